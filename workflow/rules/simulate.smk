# The generation stage under every policy, replayed from the predictor: on any number of machines, and the oracle.


rule simulate:
    input:
        predictor="results/{experiment}/predictor/model.json",
        config="results/{experiment}/config/simulate.json",
        basis="results/{experiment}/basis/simulate.json",
    output:
        expand(
            "results/{{experiment}}/simulate/{name}",
            name=["arms.parquet", "summary.json"],
        ),
    log:
        "results/{experiment}/logs/simulate.log",
    benchmark:
        "results/{experiment}/benchmarks/simulate.tsv"
    conda:
        CONDA
    container:
        CLUSTER.container
    envmodules:
        *CLUSTER.modules,
    resources:
        **slurm(),
    message:
        "Simulation ({wildcards.experiment})"
    shell:
        "pat logged {log} simulate --config {input.config}"
