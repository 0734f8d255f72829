"""Runs a module that counts every call of the project's own functions: MODULE ARGUMENTS...

The counts go to FOLDER/PID.json, where COUNT_CALLS names the folder, whenever a file FOLDER/PID.ask appears, which is
then removed.
"""

import cProfile
import json
import os
import runpy
import sys
import threading
import time
from collections import Counter
from pathlib import Path

_PERIOD_S = 0.02


def _count(folder: Path) -> None:
    profiles: list[cProfile.Profile] = []  # one a thread
    root = str(Path(__file__).parents[2]) + os.sep

    def enable(*_: object) -> None:
        profiles.append(cProfile.Profile(builtins=False))
        profiles[-1].enable()

    def counts() -> Counter[str]:
        named: Counter[str] = Counter()
        for entry in [entry for profile in profiles for entry in profile.getstats()]:
            path = getattr(entry.code, "co_filename", "").removeprefix(root)
            if path.startswith(("coppice/", "services/", "orchestrator/")):
                named[f"{path}:{entry.code.co_firstlineno} {entry.code.co_qualname}"] += entry.callcount
        return named

    def answer() -> None:
        ask = folder / f"{os.getpid()}.ask"
        while True:
            time.sleep(_PERIOD_S)
            if ask.exists():
                partial = folder / f"{os.getpid()}.partial"
                partial.write_text(json.dumps(counts()), encoding="utf-8")
                partial.replace(folder / f"{os.getpid()}.json")
                ask.unlink()

    threading.Thread(target=answer, daemon=True).start()
    threading.setprofile(enable)
    enable()


if __name__ == "__main__":
    _count(Path(os.environ["COUNT_CALLS"]))
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
