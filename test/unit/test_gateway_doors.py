"""Settings of the doors, what opens them, and what they cost to import."""

import asyncio
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("tokenizers")
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
import grpc.aio
from chat_service import ScriptedService
from grpc_rig import ask
from tiny_chat_tokenizer import tiny_tokenizer

from vla_cloud.config import CloudConfig, GatewayConfig, ServingConfig
from vla_cloud.gateway.doors import Doors
from vla_cloud.gateway.grpc_server import GrpcServer
from vla_cloud.gateway.proto import vla_chat_pb2_grpc as pb_grpc
from vla_cloud.gateway.settings import GatewayError, GrpcRules
from vla_common.clock import SystemClock

ROOT = Path(__file__).parents[2]
CONFIG = CloudConfig(
    serving=ServingConfig(model="some/where/small"), gateway=GatewayConfig(grpc_listen="127.0.0.1:0", drain_s=2.0)
)


def test_doors_open_serve_drain_and_close(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_cloud.gateway.grpc_server._LAST_WORDS_S", 60.0)

    async def go():
        service = ScriptedService(lambda _: [[*b"Hello"]], gate=asyncio.Event())
        doors = Doors(CONFIG, tiny_tokenizer(tmp_path), service, SystemClock())
        assert doors.chat.model_names == ["small"]
        await doors.start()
        (door,) = doors._doors
        assert isinstance(door, GrpcServer)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{door.port}") as channel:
            call = pb_grpc.ChatStub(channel).Generate(ask(model="small"))
            while not service.running:
                await asyncio.sleep(0.001)
            stop = asyncio.create_task(doors.stop())
            while not service.draining:
                await asyncio.sleep(0.001)
            service.gate.set()
            assert (await call).text == "Hello"
            await stop

    asyncio.run(go())


def test_if_one_door_cannot_be_opened_none_is(tmp_path):
    async def go():
        tokenizer, service = tiny_tokenizer(tmp_path), ScriptedService(lambda _: [])
        first = Doors(CONFIG, tokenizer, service, SystemClock())
        await first.start()
        taken = f"127.0.0.1:{first._doors[0].port}"
        gateway = replace(CONFIG.gateway, control_listen=taken)
        second = Doors(replace(CONFIG, gateway=gateway), tokenizer, service, SystemClock())
        with pytest.raises(GatewayError, match="in use"):
            await second.start()
        assert not second._doors[0]._servers
        await first.stop()

    asyncio.run(go())


def test_a_door_needs_a_model_and_leave_for_other_machines(tmp_path):
    with pytest.raises(ValueError, match="serving.model"):
        CloudConfig(gateway=GatewayConfig(grpc_listen="127.0.0.1:0"))
    config = replace(CONFIG, gateway=GatewayConfig(grpc_listen="0.0.0.0:0"))
    with pytest.raises(GatewayError, match="other machines"):
        Doors(config, None, None, SystemClock())
    for name in ("insecure_non_loopback", "allow_non_loopback"):  # the second is its old name
        Doors(replace(config, **{name: True}), None, None, SystemClock())


@pytest.mark.parametrize("name", ["max_message_bytes", "max_rpcs", "slow_reader_s", "keepalive_s"])
def test_limits_that_serve_nobody_are_refused(name):
    with pytest.raises(ValueError, match=name):
        GrpcRules(**{name: 0})


def test_the_gateway_loads_no_torch(tmp_path):
    tiny_tokenizer(tmp_path)
    code = (
        "import dataclasses, sys\n"
        "from vla_cloud.cloud_main import _doors\n"
        "from vla_cloud.config import CloudConfig, GatewayConfig, ServingConfig\n"
        "config = CloudConfig(serving=ServingConfig(model=sys.argv[1]), gateway=GatewayConfig(grpc_listen='127.0.0.1:0'))\n"
        "assert _doors(config, None).chat.model_names\n"
        "print(sorted({'torch', 'numba', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n", found.stdout


def make_proto(root):
    """In a process of its own: the compiler's extension module does not bear other users of protobuf beside it."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import make_proto, pathlib; " \
             "print([path.name for path in make_proto.changed(pathlib.Path(sys.argv[2]))])"
    command = [sys.executable, "-c", script, str(ROOT / "tools"), str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_the_generated_modules_are_current(tmp_path):
    assert make_proto(ROOT) == "[]", "run python tools/make_proto.py"
    # The check can fail.
    folder = Path("vla_cloud/gateway/proto")
    shutil.copytree(ROOT / folder, tmp_path / folder)
    stub = tmp_path / folder / "vla_chat_pb2_grpc.py"
    stub.write_text(stub.read_text().replace("Abort", "Abrot"))
    (tmp_path / folder / "vla_chat_pb2.pyi").unlink()
    assert make_proto(tmp_path) == "['vla_chat_pb2.pyi', 'vla_chat_pb2_grpc.py']"

