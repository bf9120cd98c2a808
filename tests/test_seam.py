"""The tables of SGLang's and verl's names: true of the installed packages, and the only such places."""

import ast
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import pat
from pat.seam import Seam, SeamError, attributes, resolve

PACKAGE = Path(pat.__file__).parent
TABLES = {"sglang": PACKAGE / "engine" / "sglang_api.py", "verl": PACKAGE / "rl" / "verl_api.py"}


def seam(names, methods=()):
    """A seam of an installed package, as if written for a version of it that never was."""
    return Seam("psutil", "0.0.1", names, methods)


def test_a_dotted_path_is_an_attribute_or_a_module():
    assert resolve("pathlib.Path") is Path
    assert resolve("json.decoder.JSONDecoder") is json.JSONDecoder
    assert resolve("xml.sax.saxutils").__name__ == "xml.sax.saxutils"  # a module that nobody imported yet


@pytest.mark.parametrize("dotted", ["json.no_such_thing", "no_such_package.thing", "json.JSONDecoder.nothing"])
def test_what_does_not_exist_cannot_be_resolved(dotted):
    with pytest.raises((ImportError, AttributeError)):
        resolve(dotted)


def test_all_as_expected_is_no_problem():
    table = seam({"dumps": ("json.dumps", ("obj", "indent"))}, (("Decoder", "decode", ("self", "s")),))
    table.names["Decoder"] = ("json.JSONDecoder", ())
    assert table.problems() == []
    table.check()
    assert table.get("dumps") is json.dumps


@pytest.mark.parametrize(
    ("names", "methods", "told"),
    [
        ({"x": ("json.gone", ())}, (), ["json.gone"]),
        ({"x": ("gone_package.x", ())}, (), ["gone_package.x", "gone_package"]),
        ({"x": ("json.dumps", ("obj", "width"))}, (), ["json.dumps no longer takes width"]),
        ({"x": ("json.dumps", ("width", "depth"))}, (), ["json.dumps no longer takes depth, width"]),
        ({"x": ("json.__name__", ("obj",))}, (), ["json.__name__ no longer takes obj"]),  # not even callable
        ({"D": ("json.JSONDecoder", ())}, (("D", "gone", ()),), ["json.JSONDecoder.gone"]),
        (
            {"D": ("json.JSONDecoder", ())},
            (("D", "decode", ("self", "text")),),
            ["json.JSONDecoder.decode no longer takes text"],
        ),
    ],
)
def test_a_missing_name_or_parameter_is_named(names, methods, told):
    (problem,) = seam(names, methods).problems()
    assert all(part in problem for part in told)


def test_check_tells_all_problems_and_both_versions():
    with pytest.raises(SeamError) as caught:
        seam({"x": ("json.gone", ()), "y": ("json.dumps", ("width",))}).check()
    text = str(caught.value)
    assert "json.gone" in text
    assert "json.dumps no longer takes width" in text
    assert "psutil 0.0.1" in text
    assert version("psutil") in text
    assert "psutil==0.0.1" in text


def test_a_name_outside_of_the_table_is_refused():
    with pytest.raises(AttributeError, match=r"dumps.*psutil"):
        seam({"loads": ("json.loads", ())}).get("dumps")


@pytest.fixture(scope="module")
def installed():
    """What the two tables find of the installed packages, in a process where nothing was imported before."""
    code = (
        "from pat.engine.cpu import environment; environment.prepare()\n"
        "import json, sys\n"
        "from pat.engine import sglang_api\n"
        "from pat.rl import verl_api\n"
        "before = [name for name in sys.modules if name.split('.')[0] in ('sglang', 'verl')]\n"
        "found = {s.package: s.problems() for s in (sglang_api.seam, verl_api.seam)}\n"
        "found['imported by the tables'] = before\n"
        "print('\\n' + json.dumps(found))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("package", ["sglang", "verl"])
def test_the_table_is_true_of_the_installed_package(installed, package):
    assert installed[package] == []


def test_the_tables_import_nothing_by_themselves(installed):
    assert installed["imported by the tables"] == []


@pytest.mark.parametrize("package", ["sglang", "verl"])
def test_the_table_is_written_for_the_installed_version(package):
    stated = [
        node.args[1].value
        for node in ast.walk(ast.parse(TABLES[package].read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Seam"
    ]
    assert stated == [version(package)]


def foreign_imports(source: str) -> list[str]:
    """Modules of SGLang and verl that import statements of ``source`` name, wherever they stand."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(node.module)
    return [name for name in found if name.split(".")[0] in ("sglang", "verl")]


def test_an_import_is_found_wherever_it_stands():
    source = "import json, sglang.srt.utils as u\ndef f():\n    from verl.x import y\n"
    source += "from . import verl\nimport sglangs\n"
    assert sorted(foreign_imports(source)) == ["sglang.srt.utils", "verl.x"]


def test_no_other_file_imports_from_sglang_or_verl():
    files = set(PACKAGE.rglob("*.py")) - set(TABLES.values())
    assert len(files) > 20
    offenders = {str(file.relative_to(PACKAGE)): foreign_imports(file.read_text()) for file in files}
    assert {file: names for file, names in offenders.items() if names} == {}


def test_an_object_without_an_attribute_that_pat_sets_is_an_error_that_names_it():
    seam = Seam("pytest", "0.0", {})
    seam.require(Path("."), ("name", "parent"))
    with pytest.raises(SeamError, match=r"lacks nest, nests; .* install pytest==0\.0"):
        seam.require(Path("."), ("name", "nest", "nests"))


class Held:
    typed: int

    def __init__(self):
        self.set_here = 1

    def later(self, other):
        self.set_later, other.of_another = 2, 3


def test_attributes_that_a_class_sets_or_states_are_found_without_an_instance():
    found = attributes(Held)
    assert {"typed", "set_here", "set_later", "later"} <= found
    assert "gone" not in found
    table = Seam(
        "pytest", "0.0", {"Held": ("tests.test_seam.Held", ())}, held=[("Held", ("typed", "gone", "set_here"))]
    )
    assert table.problems() == ["tests.test_seam.Held no longer has gone"]


def used(source: str, objects: dict) -> set[tuple[str, str]]:
    """(name of an object of ``objects``, attribute) wherever ``source`` reads or sets one; within a class that takes
    the place of SGLang's, ``self`` is such an object and what the class itself defines is not meant.
    """
    ours = {"PatScheduler": "scheduler", "TokenizerManager": "tokenizer_manager"}
    found = set()

    def dotted(node) -> str | None:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
            return f"{base}.{node.attr}"
        return None

    def look(node, stands_for: str | None, own: set[str]) -> None:
        if isinstance(node, ast.ClassDef):
            stands_for = ours.get(node.name)
            inside = list(ast.walk(node))
            own = {n.name for n in inside if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
            own |= {n.attr for n in inside if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
            if base == "self" and stands_for and node.attr not in own:
                found.add((stands_for, node.attr))
            parts = base.split(".")
            for name in (".".join(parts[-2:]), parts[-1]):
                if name in objects and base not in ("self.pool", "self.controller"):  # those two are PAT's
                    found.add((name, node.attr))
                    break
        for child in ast.iter_child_nodes(node):
            look(child, stands_for, own)

    look(ast.parse(source), None, set())
    return found


def test_uses_of_listed_objects_are_found():
    source = "class PatScheduler:\n def f(self):\n  self.mine = self.theirs\n  self.f()\n"
    source += "scheduler.x.y = self.scheduler.z\nreq.kv.n\nself.pool.ours\n"
    assert used(source, {"scheduler": 0, "req": 0, "req.kv": 0, "pool": 0}) == {
        ("scheduler", "theirs"),
        ("scheduler", "x"),
        ("scheduler", "z"),
        ("req", "kv"),
        ("req.kv", "n"),
    }


def test_what_the_engine_uses_of_sglangs_objects_is_in_the_table():
    from pat.engine.sglang_objects import COMMUNICATORS, METHODS, OBJECTS, WITH_OVERLAP

    listed = {(name, attribute) for name, (_, attributes) in OBJECTS.items() for attribute in attributes}
    listed |= {(name, method) for name, (kind, _) in OBJECTS.items() for owner, method, _ in METHODS if owner == kind}
    listed |= {("scheduler", name) for name in WITH_OVERLAP}
    listed |= {("tokenizer_manager", name) for name in COMMUNICATORS}
    # The engine's tokenizer manager is PAT's own subclass.
    listed |= {("tokenizer_manager", name) for name in ("buckets", "check_memory", "parameters", "sent")}
    found = {
        (str(file.relative_to(PACKAGE)), *use)
        for file in (PACKAGE / "engine").rglob("*.py")
        for use in used(file.read_text(), OBJECTS)
        if not use[1].startswith("pat_")  # what PAT itself notes on an object
    }
    assert len(found) > 100
    assert {one for one in found if one[1:] not in listed} == set()
    assert {name for _, name, _ in found} >= {"scheduler", "runner", "req", "req.kv", "batch", "controller", "pool"}
