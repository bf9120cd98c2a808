"""The tables of SGLang's and verl's names: true of the installed packages, and the only such places."""

import ast
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import pat
from pat.seam import Seam, SeamError, resolve

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
