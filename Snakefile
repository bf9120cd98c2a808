# PAT from the machine to the report: hardware -> assets -> profile -> predictor -> train (an arm a job) and simulate
# -> report.
# Run it with `snakemake --profile local all`, or `--profile slurm` on a cluster.
from snakemake.utils import min_version

min_version("9.0")


# With --configfile that file is the whole configuration; Snakemake would merge the two and run the default
# experiments as well.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/prepare.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/simulate.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        [f"results/{name}/report/index.html" for name in EXPERIMENTS],
        [f"results/{name}/tracking/{stage}.json" for name in EXPERIMENTS for stage in stages(name)],
    localrule: True
