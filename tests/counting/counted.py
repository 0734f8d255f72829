"""Runs a module that counts every call of the project's own functions: MODULE ARGUMENTS...

The counts go to FOLDER/PID.json, where COUNT_CALLS names the folder, whenever a file FOLDER/PID.ask appears, which is
then removed. What was imported before is not slowed by being counted.
"""

import json
import os
import runpy
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

_PERIOD_S = 0.02


def _count(folder: Path) -> None:
    counts: Counter[CodeType] = Counter()
    root = str(Path(__file__).parents[2]) + os.sep
    own = {}

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            if code not in own:
                path = code.co_filename.removeprefix(root)
                own[code] = path != code.co_filename and path.startswith(("coppice/", "services/", "orchestrator/"))
            if own[code]:
                counts[code] += 1

    def answer() -> None:
        ask = folder / f"{os.getpid()}.ask"
        while True:
            time.sleep(_PERIOD_S)
            if ask.exists():
                named = Counter()
                for code, count in list(counts.items()):
                    named[f"{code.co_filename.removeprefix(root)}:{code.co_firstlineno} {code.co_qualname}"] += count
                partial = folder / f"{os.getpid()}.partial"
                partial.write_text(json.dumps(named), encoding="utf-8")
                partial.replace(folder / f"{os.getpid()}.json")
                ask.unlink()

    threading.Thread(target=answer, daemon=True).start()
    threading.setprofile(profile)
    sys.setprofile(profile)


if __name__ == "__main__":
    _count(Path(os.environ["COUNT_CALLS"]))
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
