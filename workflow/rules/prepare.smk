# What training needs: the machine, the model and its data, and how fast they are together.


# What a stage reads of the configuration, and what it rests on besides (pat/basis.py), in files of its own: they
# change when, and only when, one of these does, and so decide what runs again.
rule config:
    output:
        config="results/{experiment}/config/{stage}.json",
        basis="results/{experiment}/basis/{stage}.json",
    log:
        "results/{experiment}/logs/config-{stage}.log",
    benchmark:
        "results/{experiment}/benchmarks/config-{stage}.tsv"
    localrule: True
    conda:
        "../../envs/conda-cpu.yaml"
    params:
        config=lambda w: settings(w.experiment, w.stage),
        basis=lambda w: kept(basis(w.experiment, w.stage)),
    message:
        "Settings of {wildcards.stage} ({wildcards.experiment})"
    shell:
        "(printf '%s\\n' {params.config:q} > {output.config} && "
        "cat {params.basis} > {output.basis}) 2> {log}"


rule hardware:
    input:
        config="results/{experiment}/config/hardware.json",
        basis="results/{experiment}/basis/hardware.json",
    output:
        "results/{experiment}/hardware.json",
    log:
        "results/{experiment}/logs/hardware.log",
    benchmark:
        "results/{experiment}/benchmarks/hardware.tsv"
    localrule: True
    conda:
        "../../envs/conda-cpu.yaml"
    message:
        "Hardware ({wildcards.experiment})"
    shell:
        "pat logged {log} hardware --config {input.config}"


rule assets:
    input:
        config="results/{experiment}/config/assets.json",
        basis="results/{experiment}/basis/assets.json",
    output:
        model=directory("results/{experiment}/model"),
        train="results/{experiment}/data/train.parquet",
        val="results/{experiment}/data/val.parquet",
    log:
        "results/{experiment}/logs/assets.log",
    benchmark:
        "results/{experiment}/benchmarks/assets.tsv"
    conda:
        CONDA
    container:
        CLUSTER.container
    envmodules:
        *CLUSTER.modules,
    resources:
        **slurm(),
    message:
        "Model and data ({wildcards.experiment})"
    shell:
        "pat logged {log} assets --config {input.config}"


rule profile:
    input:
        config="results/{experiment}/config/profile.json",
        model=profile_model,
        basis="results/{experiment}/basis/profile.json",
    output:
        expand(
            "results/{{experiment}}/profile/{name}",
            name=[
                "decode.parquet",
                "prefill.parquet",
                "switch.parquet",
                "transfer.parquet",
                "generation.parquet",
                "machine.json",
            ],
        ),
    log:
        "results/{experiment}/logs/profile.log",
    benchmark:
        "results/{experiment}/benchmarks/profile.tsv"
    conda:
        CONDA
    container:
        CLUSTER.container
    envmodules:
        *CLUSTER.modules,
    threads: lambda w: max(1, profile_ranks(w))
    resources:
        **slurm(profile_ranks),
        machine=1,
    message:
        "Profile of the engine ({wildcards.experiment})"
    shell:
        "pat logged {log} profile --config {input.config}"


rule predictor:
    input:
        profile=rules.profile.output,
        config="results/{experiment}/config/predictor.json",
        basis="results/{experiment}/basis/predictor.json",
    output:
        "results/{experiment}/predictor/model.json",
        "results/{experiment}/predictor/errors.json",
        report(
            "results/{experiment}/predictor/fit.png",
            caption="../report/fit.rst",
            category="{experiment}",
            labels={"shows": "latency model against the profile"},
        ),
    log:
        "results/{experiment}/logs/predictor.log",
    benchmark:
        "results/{experiment}/benchmarks/predictor.tsv"
    conda:
        CONDA
    container:
        CLUSTER.container
    envmodules:
        *CLUSTER.modules,
    resources:
        **slurm(),
    message:
        "Predictor ({wildcards.experiment})"
    shell:
        "pat logged {log} predictor --config {input.config}"
