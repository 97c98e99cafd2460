"""Launcher that runs ranks in pods of Kubernetes, as a TrainJob of Kubeflow Trainer."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final, final

from fabricx.launch.launcher import Ended, Launcher, Program
from fabricx.launch.ranks import GATHER_S
from fabricx.launch.signals import StopRequests
from fabricx.launch.worker import Failure
from fabricx.launchers import pod
from fabricx.launchers.output import MainOutput

LOOK_S: Final = 0.5  # seconds between two looks at the folder
STATE_S: Final = 5.0  # seconds between two requests to Kubernetes
LATE_S: Final = 60.0  # seconds that a result may need to arrive after the end of the job, on a network file system
REPORT_S: Final = 5.0  # seconds that a failure may need to arrive
AGAIN_S: Final = 300.0  # limit for the creation of a further TrainJob of a run
DELETIONS: Final = 3  # attempts to delete a TrainJob
SILENT: Final = 10  # requests without an answer, after which a message is printed
HINT_S: Final = 60.0  # seconds without a started pod, after which the command that shows the reason is printed
KILL_S: Final = 5.0  # seconds for ranks to end after SIGKILL
COMMAND_S: Final = 15.0  # limit for a command
_RESOURCE: Final = "trainjobs.trainer.kubeflow.org"
_SHARED: Final = ("cpu", "memory", "ephemeral-storage")  # resources that pods may share
_DELETED: Final = "the TrainJob was deleted"
_PREFIX: Final = re.compile(r"[a-z]([-a-z0-9]{0,30}[a-z0-9])?", re.ASCII)  # pods have it in their host names


@final
class Kubernetes(Launcher):
    """Run the ranks in pods, as a TrainJob of Kubeflow Trainer 2.2 or later.

    This process may run in a pod or on any machine with `kubectl`. It writes the TrainJob to a folder, applies it,
    waits for its end, and prints the output of the main rank. Without `kubectl` it prints the command that applies the
    file elsewhere, and waits. Ctrl-C requests the ranks to stop at their next step. With the callback FaultRecovery the
    run continues from the newest checkpoint in new pods after the loss of a process or pod.

    The project, the run's folder and `folder` have to be on volumes that this process and all pods mount at the same
    path, and pods have to run as the user of this process.

    Args:
        image: image of the pods, with fabricx; None for the image of the runtime.
        volumes: path of each persistent volume claim that the pods mount, by its name. Without any, the runtime has to
            mount what this process shares with the pods.
        runtime: name of a ClusterTrainingRuntime for torch.
        namespace, context: as of kubectl; None for its current ones.
        cpus_per_rank: cores for each rank.
        resources: further resources of each pod, such as {"memory": "64Gi", "rdma/hca": 1}.
        gpu: name of the resource of which each rank has one, if it computes on a GPU.
        environment: environment variables of the ranks.
        python: interpreter in the image.
        spec: added to the TrainJob's `spec`, such as {"activeDeadlineSeconds": 86400}: mappings are merged, and lists,
            such as `runtimePatches`, are appended.
        labels: labels of the TrainJob, such as {"kueue.x-k8s.io/queue-name": "team"}.
        shared_memory: mount memory at /dev/shm, of which a container has 64 MiB otherwise; False if the runtime does.
        grace_s: seconds that ranks have to save a checkpoint when Kubernetes ends their pod, with Kubeflow Trainer 2.3;
            None for 30.
        folder: parent of the jobs' folders, which only this user may read.
        prefix: first part of the TrainJob's name.
        lost_after_s: seconds without a sign of life, after which a pod counts as lost.
    """

    starts_servers = True

    def __init__(
        self, image: str | None = None, volumes: Mapping[str, str] | None = None, runtime: str = "torch-distributed",
        namespace: str | None = None, context: str | None = None, cpus_per_rank: int = 1,
        resources: Mapping[str, Any] | None = None, gpu: str = "nvidia.com/gpu",
        environment: Mapping[str, str] | None = None, python: str = "python", spec: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None, shared_memory: bool = True,
        grace_s: int | None = None, folder: str = "kubernetes_jobs", prefix: str = "fabricx",
        lost_after_s: float = 30.0,
    ) -> None:  # fmt: skip
        if cpus_per_rank < 1:
            raise ValueError(f"cpus_per_rank={cpus_per_rank}: set 1 or more")
        if lost_after_s < 5 * pod.ALIVE_S:
            raise ValueError(f"lost_after_s={lost_after_s:g}: set {5 * pod.ALIVE_S:g} or more")
        if grace_s is not None and grace_s < 1:
            raise ValueError(f"grace_s={grace_s}: set 1 or more")
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(
                f"prefix={prefix!r}: set up to 32 lower-case letters, digits and '-', beginning with a letter"
            )
        self.image, self.volumes, self.runtime = image, dict(volumes or {}), runtime
        self.namespace, self.context, self.gpu, self.python = namespace, context, gpu, python
        self.cpus_per_rank, self.resources, self.environment = cpus_per_rank, dict(resources or {}), environment or {}
        self.spec, self.folder, self.prefix, self.lost_after_s = dict(spec or {}), folder, prefix, lost_after_s
        self.grace_s, self.labels, self.shared_memory = grace_s, dict(labels or {}), shared_memory
        self._created = False  # a TrainJob
        paths = [PurePosixPath(path) for path in self.volumes.values()]
        if relative := [str(path) for path in paths if not path.is_absolute()]:
            raise ValueError(f"volumes: {relative[0]!r} is not an absolute path of the pods")
        if paths and not any(Path(folder).absolute().is_relative_to(path) for path in paths):
            raise ValueError(
                f"folder={str(Path(folder).absolute())!r} is on none of the volumes of the pods, which are at "
                f"{', '.join(map(str, paths))}: set a folder below one of these paths, where this process has it, too"
            )

    def run(self, program: Program) -> Ended:
        if program.gpus_unused:
            raise ValueError(
                "this process sees no GPU, so the run would train on CPUs in all pods: set accelerator to 'gpu', or to "
                "'cpu'"
            )
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y-%m-%d_%H-%M-%S_"), dir=self.folder)).absolute()
        name = f"{self.prefix}-{secrets.token_hex(3)}"
        try:
            threads = {"OMP_NUM_THREADS": str(self.cpus_per_rank)}
            pod.write_program(folder, program, {**threads, **{key: str(v) for key, v in self.environment.items()}})
            file = folder / "trainjob.yaml"
            file.write_text(_yaml(self.train_job(program, folder, name)))
            job = _TrainJob(name, self._kubectl())
            pods = [_Pod(folder, number, self.lost_after_s) for number in range(program.nodes)]
            requests = StopRequests(stops_at_step=program.stops_at_step)
            with requests.received():  # also while the TrainJob is created and deleted
                try:
                    job.create(file, requests, again=self._created)
                    self._created = True
                    print(f"TrainJob {name}: {file}; output of all pods: {folder}", flush=True)
                    return self._wait(folder, pods, job, requests)
                finally:
                    try:
                        _kill(folder, pods)
                    finally:
                        job.delete()
        finally:
            # They contain the job, its key and its result.
            for path in (folder / "job", folder / "program.json", *folder.glob("*ended-*")):
                path.unlink(missing_ok=True)

    def train_job(self, program: Program, folder: Path, name: str) -> dict[str, Any]:
        """Return the TrainJob.

        Args:
            program: what its pods run.
            folder: the job's folder.
            name: name of the TrainJob.
        """
        cores = self.cpus_per_rank * (program.processes + program.servers)  # all pods are alike
        requests = {"cpu": cores, **self.resources}
        requests |= {self.gpu: program.processes} if program.gpus else {}
        # Kubernetes wants limits of what pods can't share.
        limits = {name: amount for name, amount in requests.items() if name not in _SHARED}
        trainer = {
            **({} if self.image is None else {"image": self.image}),
            "numNodes": program.nodes, "numProcPerNode": program.processes,
            "command": [self.python, "-m", pod.__name__], "args": [str(folder)],
            "resourcesPerNode": {"requests": requests, **({"limits": limits} if limits else {})},
        }  # fmt: skip
        mounts, volumes = list[dict[str, Any]](), list[dict[str, Any]]()
        if self.shared_memory:  # for loader processes, and sums of ranks
            mounts.append({"name": "memory", "mountPath": "/dev/shm"})
            volumes.append({"name": "memory", "emptyDir": {"medium": "Memory"}})
        for number, (claim, path) in enumerate(self.volumes.items()):
            mounts.append({"name": f"volume-{number}", "mountPath": path})
            volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        container = {"name": "node", "volumeMounts": mounts}
        pod_spec = {
            "containers": [container], "volumes": volumes,
            "securityContext": {"runAsUser": os.getuid(), "runAsGroup": os.getgid()},
            **({} if self.grace_s is None else {"terminationGracePeriodSeconds": self.grace_s}),
        }  # fmt: skip
        pods = {"spec": {"template": {"spec": pod_spec}}}
        patch = {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": pods}]}}}
        spec = {
            "runtimeRef": {"name": self.runtime}, "trainer": trainer,
            "runtimePatches": [{"manager": "fabricx.dev/launcher", "trainingRuntimeSpec": patch}],
        }  # fmt: skip
        metadata = {"name": name, "namespace": self.namespace, "labels": self.labels}
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob",
            "metadata": {key: value for key, value in metadata.items() if value}, "spec": _merged(spec, self.spec),
        }  # fmt: skip

    def _kubectl(self) -> list[str]:
        flags = {"--context": self.context, "--namespace": self.namespace}
        return ["kubectl", *(f"{option}={value}" for option, value in flags.items() if value is not None)]

    def _wait(self, folder: Path, pods: list[_Pod], job: _TrainJob, requests: StopRequests) -> Ended:
        waiting, output, hint_at = list(pods), MainOutput(folder / "output-0"), time.monotonic() + HINT_S
        result, failures, deadline = None, list[Failure](), float("inf")
        while waiting and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            output.copy()
            over = job.over()  # before the look for results: a pod writes its result before the job ends
            for member in tuple(waiting):
                if (ended := member.ended(over)) is not None:
                    waiting.remove(member)
                    result = result if ended.result is None else ended.result
                    failures += ended.failures
            if failures and deadline == float("inf"):
                deadline = time.monotonic() + GATHER_S + REPORT_S
            if time.monotonic() > hint_at and (late := sum(not member.started for member in pods)):
                print(f"{late} of {len(pods)} pods have not started; this shows the reason:\n{job.shows}", flush=True)
                hint_at = float("inf")
            # A job whose ranks have not begun is deleted.
            if (requested := requests.arrived(begun=lambda: all(member.started for member in pods))) is not None:
                pod.replace(folder / "signal", str(int(requested)).encode())
        output.copy(ended=True)
        stopping = bool(requests) or (bool(failures) and job.is_deleted())
        return Ended(None if failures else result, tuple(failures), stopping=stopping)


def _kill(folder: Path, pods: list[_Pod]) -> None:
    """Kill ranks that have not ended by themselves: they would write checkpoints while the next ranks train."""
    deadline = time.monotonic() + KILL_S
    if any(member.runs for member in pods):
        with contextlib.suppress(OSError):  # the disk is full, for example
            pod.replace(folder / "signal", str(int(signal.SIGKILL)).encode())
    while any(member.runs for member in pods) and time.monotonic() < deadline:
        time.sleep(LOOK_S)


@final
class _Pod:
    """A pod, as seen from the folder.

    Args:
        folder: of the job.
        number: number of the pod.
        lost_after_s: seconds without a sign of life, after which it counts as lost.
    """

    def __init__(self, folder: Path, number: int, lost_after_s: float) -> None:
        self._folder, self._number, self._lost_after_s = folder, number, lost_after_s
        self._alive, self._seen_at = b"", time.monotonic()

    @property
    def started(self) -> bool:
        """Return whether it has started."""
        return (self._folder / f"started-{self._number}").exists()

    @property
    def runs(self) -> bool:
        """Return whether its ranks may run."""
        return self.started and not (self._folder / f"ended-{self._number}").exists()

    def ended(self, over: str | None) -> Ended | None:
        """Return the end of its ranks; None while they run.

        Args:
            over: how the job has ended; None while it runs.
        """
        with contextlib.suppress(OSError):
            return pickle.loads((self._folder / f"ended-{self._number}").read_bytes())  # type: ignore[no-any-return]
        now, content = time.monotonic(), self._alive
        with contextlib.suppress(OSError):
            content = (self._folder / f"alive-{self._number}").read_bytes()
        if content != self._alive or not content:
            self._alive, self._seen_at = content, now
        if over is not None:
            text = f"was lost: {over}"
        elif now > self._seen_at + self._lost_after_s:
            text = f"was lost: it gave no sign of life for {self._lost_after_s:g} s"
        else:
            return None
        return Ended(failures=(pod.lost(self._folder, self._number, text),))


@final
class _TrainJob:
    """A TrainJob, by commands of kubectl; without kubectl, a user applies it.

    Args:
        name: its name.
        kubectl: the command with its options.
    """

    def __init__(self, name: str, kubectl: list[str]) -> None:
        self._name, self._kubectl = name, kubectl
        self._able = shutil.which(kubectl[0]) is not None
        self._looked = self._over_at = float("-inf")
        self._over: str | None = None
        self._created = False
        self._unanswered = 0  # requests since the newest answer

    @property
    def shows(self) -> str:
        """Return the commands that show why pods don't start."""
        kubectl = " ".join(self._kubectl)
        label = f"jobset.sigs.k8s.io/jobset-name={self._name}"
        return f"  {kubectl} describe {_RESOURCE} {self._name}\n  {kubectl} describe pods -l {label}"

    def create(self, file: Path, requests: StopRequests, *, again: bool) -> None:
        """Create the TrainJob.

        Args:
            file: with the TrainJob.
            requests: a request to stop ends further attempts.
            again: the cluster has accepted an earlier TrainJob of the run, and may be out of reach for a moment.

        Raises:
            ValueError: the cluster refuses it, or cannot be reached.
        """
        if not self._able:
            command = " ".join([*self._kubectl, "create", "-f", str(file)])
            print(f"kubectl is not installed here; this command, elsewhere, starts the run:\n  {command}", flush=True)
            return
        deadline = time.monotonic() + (AGAIN_S if again else 0.0)
        while (answer := self._run("create", "-f", str(file))).returncode and "AlreadyExists" not in answer.stderr:
            if requests or time.monotonic() > deadline:
                raise ValueError(
                    f"the TrainJob was not created:\n{answer.stderr.strip()}\n  {file} is the file; the cluster needs "
                    "Kubeflow Trainer 2.2 or later (https://www.kubeflow.org/docs/components/trainer), and `kubectl "
                    "get trainjobs` has to work here"
                )
            time.sleep(STATE_S)
        self._created = True

    def delete(self) -> None:
        """Delete the TrainJob with its pods; if that fails, print the command."""
        arguments = ("delete", _RESOURCE, self._name, "--wait=false", "--ignore-not-found")
        for attempt in range(DELETIONS if self._able else 0):
            time.sleep(STATE_S if attempt else 0.0)
            if not self._run(*arguments).returncode:
                return
        if self._created or not self._able:
            command = " ".join([*self._kubectl, *arguments[:3]])
            print(f"the TrainJob has to be deleted by hand:\n  {command}", flush=True)

    def over(self) -> str | None:
        """Return how the TrainJob has ended, some time after its end, because results may arrive late."""
        if not self._able:
            return None
        if (now := time.monotonic()) > self._looked + STATE_S and self._over is None:
            self._over, self._over_at = self._state(), now
            self._looked = time.monotonic()
        return self._over if now > self._over_at + LATE_S else None

    def is_deleted(self) -> bool:
        """Return whether a user has deleted the TrainJob."""
        return self._able and self._state() == _DELETED

    def _state(self) -> str | None:
        answer = self._run("get", _RESOURCE, self._name, "-o", "json")
        if answer.returncode:
            self._unanswered += 1
            if self._unanswered == SILENT:
                print(f"kubectl can't read the TrainJob {self._name}: {answer.stderr.strip()}", flush=True)
            return _DELETED if "NotFound" in answer.stderr else None
        self._unanswered, state = 0, json.loads(answer.stdout)
        if "deletionTimestamp" in state.get("metadata", {}):
            return _DELETED
        for condition in state.get("status", {}).get("conditions", []):
            if condition["type"] in ("Failed", "Complete") and condition["status"] == "True":
                return f"the TrainJob has ended ({condition['type']}: {condition.get('message', '')})"
        return None

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command; without an answer in time the result is that of a failed command."""
        command = [*self._kubectl, *arguments]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=COMMAND_S, start_new_session=True
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"no answer within {COMMAND_S:g} s")


def _merged(base: Any, added: Any) -> Any:
    if isinstance(base, Mapping) and isinstance(added, Mapping):
        return {**base, **{key: _merged(base[key], value) if key in base else value for key, value in added.items()}}
    return [*base, *added] if isinstance(base, list) and isinstance(added, list) else added


def _yaml(content: Mapping[str, Any]) -> str:
    import yaml  # type: ignore[import-untyped]

    text: str = yaml.safe_dump(dict(content), sort_keys=False)
    return text
