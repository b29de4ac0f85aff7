"""A gateway process of its own: prints the process ids of its workers and serves until it is told to stop."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from serving_rig import RULES, rig

from vla_common.process import end_with_parent, stop_on_signals


async def go() -> None:
    stop = stop_on_signals(grace_s=10.0)
    async with rig(prefill_workers=2, supervisor=replace(RULES, hang_s=2.5)) as it:
        print(*(info.pid for info in it.supervisor.infos()), flush=True)
        while not stop.is_set():
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(go())
