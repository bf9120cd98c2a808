# What came out: the report, and every stage's run in MLflow.

OUTCOME = {
    "hardware": rules.hardware.output,
    "assets": [rules.assets.output.train, rules.assets.output.val],
    "profile": rules.profile.output,
    "predictor": rules.predictor.output,
    "simulate": rules.simulate.output,
    "report": [
        "results/{experiment}/report/index.html",
        "results/{experiment}/report/summary.json",
    ],
}


rule report:
    input:
        trained,
        hardware=rules.hardware.output,
        assets=OUTCOME["assets"],
        profile=rules.profile.output,
        predictor=rules.predictor.output,
        simulate=rules.simulate.output,
        config="results/{experiment}/config/report.json",
        code=code("report"),
    output:
        OUTCOME["report"],
    log:
        "results/{experiment}/logs/report.log",
    benchmark:
        "results/{experiment}/benchmarks/report.tsv"
    localrule: True
    conda:
        "../../envs/conda-cpu.yaml"
    message:
        "Report ({wildcards.experiment})"
    shell:
        "pat logged {log} report --config {input.config}"


# The only writer of MLflow's database. On a shared filesystem SQLite stands no second one: see the profiles.
rule track:
    input:
        outcome,
        config="results/{experiment}/config/tracking.json",
        code=code("tracking"),
    output:
        "results/{experiment}/tracking/{stage}.json",
    log:
        "results/{experiment}/logs/track-{stage}.log",
    benchmark:
        "results/{experiment}/benchmarks/track-{stage}.tsv"
    localrule: True
    conda:
        "../../envs/conda-cpu.yaml"
    resources:
        mlflow=1,
    message:
        "MLflow, {wildcards.stage} ({wildcards.experiment})"
    shell:
        "pat logged {log} track --stage {wildcards.stage} --config {input.config}"
