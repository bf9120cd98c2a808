# What came out: the report, and every stage's run in MLflow.

OUTCOME = {
    "hardware": rules.hardware.output,
    "assets": [rules.assets.output.train, rules.assets.output.val],
    "profile": rules.profile.output,
    "predictor": rules.predictor.output,
    "simulate": rules.simulate.output,
}
ROLLOUTS = "results/bench/rollout.json"  # left by `pat bench rollout`, if somebody ran it


rule report:
    input:
        trained,
        prepared,
        lambda w: [ROLLOUTS] if Path(ROLLOUTS).exists() else [],
        profile=rules.profile.output,
        predictor=rules.predictor.output,
        simulate=rules.simulate.output,
        config="results/{experiment}/config/report.json",
        basis="results/{experiment}/basis/report.json",
    output:
        report(
            "results/{experiment}/report/index.html",
            caption="../report/page.rst",
            category="{experiment}",
            labels={"shows": "report, one page"},
        ),
        report(
            "results/{experiment}/report/headline.png",
            caption="../report/headline.rst",
            category="{experiment}",
            labels={"shows": "generation time of each arm"},
        ),
        "results/{experiment}/report/summary.json",
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


OUTCOME["report"] = rules.report.output


# Shows trainings in MLflow while they run. It belongs to this process and ends with it, whichever way that ends.
onstart:
    if workflow.is_main_process and any(each.arms for each in EXPERIMENTS.values()):
        targets = {name: {"uri": each.tracking.uri} for name, each in EXPERIMENTS.items() if each.arms}
        Path("results").mkdir(exist_ok=True)
        with open("results/follow.log", "ab") as log_file:
            subprocess.Popen(
                [sys.executable, "-m", "pat.follow", json.dumps(targets)],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(processes.end_with_parent, signal.SIGTERM),
            )


# Writes to MLflow's database, in turns with what shows trainings, from this machine alone: on a shared filesystem SQLite
# stands no second one, see the profiles. To a server, chosen by the variable, any number may write; what another place
# holds already is logged there again.
rule track:
    input:
        outcome,
        config="results/{experiment}/config/tracking.json",
        basis="results/{experiment}/basis/tracking.json",
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
    params:
        uri=os.environ.get("MLFLOW_TRACKING_URI", ""),
    message:
        "MLflow, {wildcards.stage} ({wildcards.experiment})"
    shell:
        "pat logged {log} track --stage {wildcards.stage} --config {input.config}"
