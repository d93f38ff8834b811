"""Way (b): the image that `ftlab image build` makes, and clusters whose nodes run it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

import cloudpickle
import pytest

import ftlab
from ftlab import faults
from ftlab.cluster import builder, engine, image
from ftlab.errors import ClusterError
from tests import trains
from tests.conftest import require
from tests.docker.built import BASE, TAG, built
from tests.limits import COMMAND_S, JOB_S

pytestmark = [pytest.mark.docker]


@pytest.fixture(autouse=True)
def _with_image(_with_engine: None) -> None:
    found = built()
    require("image", not isinstance(found, str), str(found))


@pytest.fixture(autouse=True)
def _by_value() -> Iterator[None]:
    """An image does not hold our tests: their functions travel whole."""
    cloudpickle.register_pickle_by_value(trains)
    yield
    cloudpickle.unregister_pickle_by_value(trains)


@pytest.fixture
def client():
    with contextlib.closing(engine.connect()) as client:
        yield client


@pytest.fixture(scope="module")
def cluster() -> Iterator[ftlab.Cluster | None]:
    if engine.available() or isinstance(built(), str):
        yield None  # the test is skipped before it asks
        return
    with ftlab.Cluster(nodes=2, spares=0, backend="docker", image=TAG, echo=None) as cluster:
        yield cluster


def test_an_image_of_its_own_ends_in_the_bits_of_no_image(cluster):
    with ftlab.Cluster(nodes=2, spares=0, backend="process", echo=None) as processes:
        wanted = processes.submit(trains.everything, steps=60).result(timeout=JOB_S).digest
    pending = cluster.inject(faults.kill("rank-1", at_step=20))
    report = cluster.submit(trains.everything, steps=60).result(timeout=JOB_S)
    assert pending.wait().receipt["status"] == "killed by SIGKILL" and report.recoveries == 1
    assert report.digest == wanted is not None


def test_nothing_of_this_machine_is_bound_into_it(cluster, client):
    [things] = engine.owned(client, cluster.name)
    for container in map(client.inspect_container, things.containers):
        assert container["HostConfig"]["ReadonlyRootfs"]
        bound = sorted(mount["Destination"].rsplit("/", 1)[1] for mount in container["Mounts"])
        assert bound == ["logs", "node.json"]


def test_it_is_small_in_layers_not_root_and_knows_nothing_of_this_machine(client):
    found = client.inspect_image(TAG)
    layers = len(found["RootFS"]["Layers"]) - len(client.inspect_image(BASE)["RootFS"]["Layers"])
    assert found["Config"]["User"] == "65534:65534" and layers <= 3
    script = ("ls -d /src /etc/pip.conf /etc/apt/sources.list /root/.pip /root/.config /root/.cache 2>/dev/null\n"
              "find / -xdev -name '*.whl'")
    made = client.create_container(TAG, ["sh", "-c", script], network_disabled=True)["Id"]
    try:
        client.start(made)
        client.wait(made)
        said = client.logs(made, stderr=False).decode().split()
        assert [each for each in said if not each.startswith("/usr/share/python-wheels/")] == []  # the base's venv
    finally:
        client.remove_container(made, force=True)


def test_its_modules_are_compiled(client):
    """Nothing can be written where it runs: without byte code every start would compile everything again."""
    script = ("import importlib.util as u, os, sys\n"
              "names = ('torch', 'torch.nn.modules.linear', 'ftlab.cluster.agent')\n"
              "sys.exit(not all(os.path.exists(u.cache_from_source(u.find_spec(n).origin)) for n in names))")
    made = client.create_container(TAG, ["python3", "-c", script], network_disabled=True)["Id"]
    try:
        client.start(made)
        assert client.wait(made)["StatusCode"] == 0, client.logs(made)
    finally:
        client.remove_container(made, force=True)


def test_the_built_image_is_taken_where_nothing_can_be_bound(client, monkeypatch):
    monkeypatch.setattr(image, "_wrong_architecture", lambda engine: "the engine runs other programs")
    assert image.choose_image(client, "") == TAG
    monkeypatch.setattr(image, "BUILT", "ftlab-none-of-that-name")
    with pytest.raises(ClusterError, match=r"runs other programs; and the engine has no image") as caught:
        image.choose_image(client, "")
    assert "ftlab image build" in caught.value.hint


def test_an_image_that_is_not_there_is_said_before_anything_starts(nothing_of_ours_stays):
    with pytest.raises(ClusterError, match="the engine has no image no-such-image") as caught:
        ftlab.Cluster(nodes=1, spares=0, backend="docker", image="no-such-image", echo=None)
    assert "ftlab image build" in caught.value.hint


def test_an_image_with_another_python_is_refused(client, monkeypatch):
    monkeypatch.setattr(image.sys, "version_info", (3, 99))
    with pytest.raises(ClusterError, match=r"holds Python 3\.\d+, and this is Python 3\.99"):
        image.check_image(client, TAG)


def test_an_image_of_another_source_is_warned_of(client, monkeypatch, caplog):
    image.check_image(client, TAG)
    assert not caplog.records
    monkeypatch.setattr(image, "source_digest", lambda: "another")
    image.check_image(client, TAG)
    assert "another version of ftlab" in caplog.text


def test_building_again_takes_everything_from_before(client):
    before = client.inspect_image(TAG)["Id"]
    done = subprocess.run([sys.executable, "-m", "ftlab.cli.main", "image", "build", "--base", BASE, "--tag", TAG,
                           "--json"], capture_output=True, text=True, timeout=COMMAND_S, check=True)
    facts = json.loads(done.stdout)
    assert (facts["id"], facts["offline"]) == (before, True)


@pytest.mark.parametrize(("base", "words"), [("no-such-base", "has no image no-such-base"),
                                             (image.EMPTY, "python3 does not run in it")])
def test_a_base_that_cannot_be_one_is_said_at_once(client, base, words):
    image.ensure_empty(client)
    with pytest.raises(ClusterError, match=words):
        builder.look_at_base(client, base)
