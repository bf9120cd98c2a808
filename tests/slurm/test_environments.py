"""What jobs run in is chosen in config/cluster.yaml alone: modules and a container, on a real Slurm.

`module` and `apptainer` are doubles that note how they are called; the stages are those of faulty_pat.py.
"""

import os
import shlex
from pathlib import Path

import pytest

from tests.slurm.test_faults import MODEL, Project, finish

pytestmark = [pytest.mark.workflow, pytest.mark.slow]

APPTAINER = """#!/bin/bash
if [ "$1" = --version ]; then echo "apptainer version 1.3.4"; exit; fi
echo "$@" >> "$NOTES/apptainer.txt"
exec bash -c "${@: -1}"
"""
MODULE = '#!/bin/sh\necho "$@" >> "$NOTES/module.txt"\n'


@pytest.fixture(scope="module")
def notes(cluster, tmp_path_factory) -> Path:
    """A folder with what the doubles were asked for, by one run with modules and one with a container."""
    folder = tmp_path_factory.mktemp("environments")
    image = folder / "pat.sif"
    image.touch()
    facts = {
        "modules": "modules: [gcc/13.2, cuda/13.0]",
        "container": f"{{container: {image}, container_args: --nv --bind /scratch}}",
    }
    os.environ["NOTES"] = str(folder)
    before = os.environ["PAT_CLUSTER"]
    try:
        running = []
        for name, text in facts.items():
            (folder / name).mkdir()
            project = Project(folder / name, name)
            for program, script in (("apptainer", APPTAINER), ("module", MODULE)):
                (project.folder / "bin" / program).write_text(script)
                (project.folder / "bin" / program).chmod(0o755)
            os.environ["PAT_CLUSTER"] = str(folder / f"{name}.yaml")
            Path(os.environ["PAT_CLUSTER"]).write_text(text)
            running.append(project.start(MODEL.format(name)))
        for process in running:
            status, out = finish(process)
            assert status == 0, out[-3000:]
    finally:
        os.environ["PAT_CLUSTER"] = before
        del os.environ["NOTES"]
    return folder


def test_modules_are_loaded_in_their_order_before_the_stage(notes):
    assert "load gcc/13.2 cuda/13.0" in (notes / "module.txt").read_text().splitlines()
    assert (notes / "modules" / MODEL.format("modules")).read_text() == "whole"


def test_a_container_gets_the_gpus_and_what_else_was_asked_for(notes):
    (call,) = [
        shlex.split(line) for line in (notes / "apptainer.txt").read_text().splitlines() if " exec " in f" {line} "
    ]
    assert str(notes / "pat.sif") in call
    assert call[call.index("--nv") + 1 : call.index("--nv") + 3] == ["--bind", "/scratch"]
    assert "logged results/container/logs/assets.log assets" in " ".join(call)
    assert (notes / "container" / MODEL.format("container")).read_text() == "whole"
