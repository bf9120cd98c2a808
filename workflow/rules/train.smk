# Real verl, once an arm. Arms never share a machine: they are compared by the clock.


rule train:
    input:
        config="results/{experiment}/config/train-{arm}.json",
        model="results/{experiment}/model",
        train="results/{experiment}/data/train.parquet",
        val="results/{experiment}/data/val.parquet",
        # A static arm decides nothing, so that a new profile leaves it alone.
        predictor=lambda w: ("results/{experiment}/predictor/model.json" if w.arm == "pat" else []),
        basis="results/{experiment}/basis/train-{arm}.json",
    output:
        expand(
            "results/{{experiment}}/train/{{arm}}/{name}",
            name=[
                "iterations.parquet",
                "requests.parquet",
                "switches.parquet",
                "decode.parquet",
                "run.json",
            ],
        ),
    log:
        "results/{experiment}/logs/train-{arm}.log",
    benchmark:
        "results/{experiment}/benchmarks/train-{arm}.tsv"
    conda:
        CONDA
    container:
        CLUSTER.container
    envmodules:
        *CLUSTER.modules,
    threads: ranks
    resources:
        **slurm(ranks, train_nodes),
        machine=1,
    message:
        "Training, arm {wildcards.arm} ({wildcards.experiment})"
    shell:
        "pat logged {log} train --arm {wildcards.arm} --config {input.config}"
