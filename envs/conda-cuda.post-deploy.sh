#!/usr/bin/env bash
# Snakemake runs this in the new environment, from the folder of the Snakefile.
set -euo pipefail
pip install --no-deps -r envs/cuda.txt
pip install --no-deps --no-build-isolation -e .
