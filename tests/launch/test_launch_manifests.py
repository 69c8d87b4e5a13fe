"""What is written for Kubernetes: pods are the tasks that they are told to be."""

import base64
import json
import re
import shlex
import subprocess

import pytest
import yaml
from click.testing import CliRunner
from zstrat.daemons import options_from, parser

from zstrat.cli import main
from zstrat.cluster import TFConfigClusterResolver
from zstrat.launch.manifests import (
    KINDS,
    PodCluster,
    manifests,
    resources_from,
    secrets_from,
)
from zstrat.transport import generate_keys

CLUSTER = PodCluster("ads", "registry.example/t:1", 2, 3, ("python", "train.py"))
DAEMONS = {"zstrat-ps": "ps", "zstrat-worker": "worker"}


def of(kind, objects):
    return [each for each in objects if each["kind"] == kind]


def templates(engine, objects):
    """Each pod template, the number of its pods, and a name of one of them."""
    if engine == "kubernetes":
        for each in of("StatefulSet", objects) + of("Job", objects):
            spec, name = each["spec"], each["metadata"]["name"]
            count = spec.get("replicas") or spec["completions"]
            yield spec["template"], count, f"{name}-{{}}.ads:2222"
    elif engine == "jobset":
        (made,) = of("JobSet", objects)
        for each in made["spec"]["replicatedJobs"]:
            spec = each["template"]["spec"]
            name = f"ads-{each['name']}-0-{{}}.ads:2222"
            yield spec["template"], spec["completions"], name
    else:
        (made,) = of("TFJob", objects)
        for kind, each in made["spec"]["tfReplicaSpecs"].items():
            name = f"ads-{kind.lower()}-{{}}.default.svc:2222"
            yield each["template"], each["replicas"], name


@pytest.mark.parametrize("engine", KINDS)
def test_a_pod_is_the_task_whose_name_it_has(engine, monkeypatch):
    """As Kubernetes, and the operator of TFJob, would start it."""
    found = list(templates(engine, manifests(engine, CLUSTER)))
    jobs = ("ps", "worker", "chief")
    assert [count for _, count, _ in found] == [2, 3, 1]
    cluster = {
        job: [name.format(n) for n in range(count)]
        for job, (_, count, name) in zip(jobs, found, strict=True)
    }
    for job, (template, count, name) in zip(jobs, found, strict=True):
        (container,) = template["spec"]["containers"]
        env = {each["name"]: each.get("value") for each in container["env"]}
        assert container["env"][0]["name"] == ("HOME" if engine == "tfjob" else "INDEX")
        for index in range(count):
            config = env.get("TF_CONFIG") or json.dumps(
                {"cluster": cluster, "task": {"type": job, "index": index}}
            )
            config = config.replace("$(INDEX)", str(index))
            monkeypatch.setenv("TF_CONFIG", config)
            resolver = TFConfigClusterResolver()
            assert resolver.cluster_spec().as_dict() == cluster
            assert (resolver.task_type, resolver.task_id) == (job, index)
            own = resolver.cluster_spec().task_address(job, index)
            assert own == name.format(index)
            program, *arguments = container["command"]
            if program in DAEMONS:
                parsed = parser(DAEMONS[program], "").parse_args(arguments)
                told = options_from(parsed, DAEMONS[program])
                assert (told.task.task, told.task.bind) == (
                    f"{job}:{index}",
                    "*:2222",
                )
                assert told.settings.http == "*:9100"
            else:
                assert container["command"] == ["python", "train.py"]


@pytest.mark.parametrize("engine", KINDS)
def test_a_pod_can_do_little_and_its_keys_are_its_own(engine):
    for template, _, _ in templates(engine, manifests(engine, CLUSTER)):
        spec = template["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["automountServiceAccountToken"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
        assert mounts["/keys"]["readOnly"]
        (secret,) = [each["secret"] for each in spec["volumes"] if "secret" in each]
        assert secret["defaultMode"] == 0o400
        job = template["metadata"]["labels"]["app.kubernetes.io/component"]
        role = {"program": "chief"}.get(job, job)
        assert secret["secretName"] == f"ads-{role}"
        if job != "program":
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                get = container[probe]["httpGet"]
                ports = {p["name"]: p["containerPort"] for p in container["ports"]}
                assert ports[get["port"]] == 9100


def test_labels_select_the_pods_they_mean():
    objects = manifests("kubernetes", CLUSTER)
    (service,) = of("Service", objects)
    pods = [t["metadata"]["labels"] for t, _, _ in templates("kubernetes", objects)]
    assert all(service["spec"]["selector"].items() <= each.items() for each in pods)
    assert service["spec"]["publishNotReadyAddresses"]
    for budget in of("PodDisruptionBudget", objects):
        selector = budget["spec"]["selector"]["matchLabels"].items()
        assert sum(selector <= each.items() for each in pods) == 1


def write(*arguments):
    return CliRunner().invoke(main, ["manifests", *arguments])


def test_keys_are_in_it_only_if_they_are_asked_for(tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    generate_keys(keys)
    given = ("jobset", "--image", "i", "--keys", str(keys))
    words = write(*given, "--", "python", "train.py").output
    secrets = [path.read_text().strip() for path in keys.glob("*.secret")]
    assert not any(secret in words for secret in secrets)
    assert f"# {'':2}kubectl create secret generic zstrat-chief --from-file=" in words
    to = tmp_path / "all.yaml"
    ran = write(*given, "--with-secrets", "--to", str(to), "--", "train")
    assert ran.exit_code == 0, ran.output
    assert to.stat().st_mode & 0o777 == 0o600
    found = of("Secret", yaml.safe_load_all(to.read_text()))
    assert [each["metadata"]["name"] for each in found] == [
        "zstrat-ps",
        "zstrat-worker",
        "zstrat-chief",
    ]
    for each in found:
        role = each["metadata"]["name"].removeprefix("zstrat-")
        own = {name for name in each["data"] if name.endswith(".secret")}
        assert own == {f"{role}.secret"}
        for name, data in each["data"].items():
            assert base64.b64decode(data) == (keys / name).read_bytes()
    assert found == secrets_from(PodCluster("zstrat", "i", 1, 1, ("train",)), keys)
    # Without a folder of keys they are new ones each time.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    fresh = []
    for _ in range(2):
        ran = write("kubernetes", "--image", "i", "--with-secrets", "--", "train")
        made = of("Secret", yaml.safe_load_all(ran.output))
        assert [sorted(each["data"]) for each in made] == [
            sorted(each["data"]) for each in found
        ]
        fresh.append([each["data"]["ps.public"] for each in made])
    assert len({*fresh[0]}) == len({*fresh[1]}) == 1
    assert fresh[0] != fresh[1]
    assert not list((tmp_path / "elsewhere").iterdir())


KUBECTL = """#!/bin/sh
for word; do echo "$word"; done
"""


def test_the_words_on_top_can_be_typed(tmp_path):
    """By a shell, whatever the folder is called."""
    keys = tmp_path / "my $keys"
    generate_keys(keys)
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o700)
    text = write("kubernetes", "--image", "i", "--keys", str(keys), "--", "p").output
    said = [line[4:] for line in text.splitlines() if line.startswith("#   ")]
    assert shlex.split(said[0]) == ["zstrat", "keygen", str(keys)]
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    typed = ["/bin/sh", "-euc", "\n".join(said[1:])]
    ran = subprocess.run(typed, env=path, capture_output=True, text=True, check=True)
    public = sorted(keys.glob("*.public"))
    assert public
    assert ran.stdout.splitlines() == [
        word
        for role in ("ps", "worker", "chief")
        for word in (
            *("create", "secret", "generic", f"zstrat-{role}"),
            *(f"--from-file={file}" for file in (keys / f"{role}.secret", *public)),
        )
    ]


def test_what_is_asked_for_is_there():
    ran = write(
        *("kubernetes", "--name", "run1", "--namespace", "ml", "--image", "i:2"),
        *("--ps", "4", "--workers", "16", "--port", "3000", "--http", "8000"),
        *("--worker-resources", "cpu=500m,memory=8Gi,nvidia.com/gpu=1"),
        *("--insecure", "--", "python", "t.py", "--ps", "7", "a: b"),
    )
    assert ran.exit_code == 0, ran.output
    objects = list(yaml.safe_load_all(ran.output))
    assert {each["metadata"]["namespace"] for each in objects} == {"ml"}
    (ps,) = of("StatefulSet", objects)
    worker, program = of("Job", objects)
    assert (ps["spec"]["replicas"], worker["spec"]["completions"]) == (4, 16)
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "500m", "memory": "8Gi", "nvidia.com/gpu": "1"},
        "limits": {"memory": "8Gi", "nvidia.com/gpu": "1"},
    }
    assert {"name": "ZSTRAT_INSECURE", "value": "1"} in container["env"]
    assert len(container["volumeMounts"]) == 1
    (container,) = program["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "t.py", "--ps", "7", "a: b"]
    assert {"name": "ZSTRAT_HTTP", "value": "*:8000"} in container["env"]
    assert "run1-worker-15.run1:3000" in ran.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--name", "Ads"), "name='Ads': "),
        (("--name", "a" * 41), "at most 40"),
        (("--namespace", "a/b"), "namespace='a/b'"),
        (("--image", "a b"), "expected an image name"),
        (("--ps-resources", "cpu"), "expected NAME=AMOUNT,..., such as cpu=4,memory"),
        (("--namespace", "a" * 64), "at most 63"),
        (
            ("--ps-resources", "cpu=4,cpu=5"),
            "resources 'cpu=4,cpu=5': cpu is given more",
        ),
        (("--to", "/none/x"), "cannot write /none/x: No such file or directory"),
        (("--restarts", "-5"), "-5 is not in the range"),
        (("--http", "2222"), "expected two distinct ports"),
        (("--with-secrets", "--keys", "/none"), "`zstrat keygen /none` makes the keys"),
        (("--with-secrets", "--insecure"), "cannot be combined"),
        (("--keys", "k\nkind: Pod"), "keys='k\\nkind: Pod': expected a folder"),
    ],
)
def test_what_cannot_be_is_said(arguments, words):
    ran = write("kubernetes", "--image", "i", *arguments, "--", "train")
    assert ran.exit_code == 2
    assert words in " ".join(ran.output.split())


def expanded(text, env):
    """What Kubernetes makes of a word of a command: $(NAME) is a variable if there is
    one, and $$ is one dollar."""

    def of_one(found):
        return "$" if found[0] == "$$" else env.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", of_one, text)


@pytest.mark.parametrize("engine", KINDS)
def test_a_program_gets_its_arguments_as_they_were_given(engine):
    given = ("sh", "-c", "echo $(HOME) $$ $HOME $$(HOME) $(date) $", "$")
    objects = manifests(engine, PodCluster("ads", "i", 1, 1, given))
    *_, (program, _, _) = templates(engine, objects)
    (container,) = program["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert env["HOME"]
    assert tuple(expanded(each, env) for each in container["command"]) == given


def test_a_namespace_may_begin_with_a_digit():
    (made, *_) = manifests("jobset", PodCluster("a", "i", 1, 1, ("p",), "1team"))
    assert made["metadata"]["namespace"] == "1team"


def test_other_misuse():
    with pytest.raises(ValueError, match=r"restarts=-1.*\b0\b"):
        PodCluster("a", "i", 1, 1, ("p",), restarts=-1)
    with pytest.raises(ValueError, match="program="):
        PodCluster("a", "i", 1, 1, ())
    with pytest.raises(ValueError, match="expected 1 or more of each"):
        PodCluster("a", "i", 0, 1, ("p",))
    with pytest.raises(ValueError, match="'nomad'"):
        manifests("nomad", CLUSTER)
    assert resources_from("") == {}
    assert re.search("PROGRAM", write("kubernetes", "--image", "i").output)
