"""Import-only stand-in for torchvision. Text generation never calls it; whatever is used raises."""

import importlib.machinery
import sys
import types

__version__ = "0.0.0"


class _Missing:
    """A name that can be imported and looked into, but not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Missing(f"{self._name}.{attribute}")

    def __call__(self, *args, **kwargs):
        raise ModuleNotFoundError(f"{self._name} is not available: torchvision is a stand-in here")


class _Module(types.ModuleType):
    __path__ = ()

    def __getattr__(self, attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Missing(f"{self.__name__}.{attribute}")


for _name in (
    "io",
    "ops",
    "utils",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    _module = _Module(f"torchvision.{_name}")
    _module.__spec__ = importlib.machinery.ModuleSpec(_module.__name__, None, is_package=True)
    sys.modules[_module.__name__] = _module
    _parent, _, _leaf = f"torchvision.{_name}".rpartition(".")
    setattr(sys.modules[_parent], _leaf, _module)
