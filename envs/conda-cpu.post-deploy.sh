#!/usr/bin/env bash
# Snakemake runs this in the new environment, from the folder of the Snakefile.
set -euo pipefail
pip install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu -r envs/cpu.txt
pip install --no-deps --no-build-isolation -e .
