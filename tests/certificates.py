"""Certificates for tests, made by the commands of docs/security.md."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from coppice.config.sections import TlsSettings
from coppice.rpc.channels import Dialer

ROLES = ("verifier", "drafter", "orchestrator", "adapter", "operator", "stranger")
_PAGE = (Path(__file__).parent.parent / "docs" / "security.md").read_text(encoding="utf-8")


def documented(language: str, containing: str = "") -> str:
    """The page's block in a language."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if containing in block]
    return str(block)


class Authority:
    """A folder with an authority and a certificate of its for each role, and for a stranger."""

    def __init__(self, folder: Path, more: str = "") -> None:
        """more: further commands, such as an `issue` of another certificate for a role."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        script = documented("sh", "openssl req") + '\nissue stranger ""\n' + more
        subprocess.run(["sh", "-euc", script], cwd=folder, check=True, capture_output=True)

    def tls(self, role: str = "", **more: object) -> TlsSettings:
        """The settings of who holds a role's certificate; of a client without one when empty."""
        pair = {"cert": str(self.folder / f"{role}.pem"), "key": str(self.folder / f"{role}.key")} if role else {}
        return TlsSettings.model_validate({"ca": str(self.folder / "ca.pem"), **pair, **more})

    def flags(self, role: str, **more: object) -> dict[str, object]:
        """The same for a process."""
        told = self.tls(role, **more).model_dump(include={"ca", "cert", "key", *more})
        return {f"tls.{name}": value for name, value in told.items()}

    def dialer(self, role: str = "", token: str = "", **more: object) -> Dialer:
        """What opens that holder's channels."""
        return Dialer(tls=self.tls(role, **more), token=token)

    def replace_by(self, other: Authority) -> None:
        """Rotate everything: its files take this one's places."""
        for file in other.folder.iterdir():
            shutil.copy(file, self.folder / f"{file.name}.new")
            (self.folder / f"{file.name}.new").replace(self.folder / file.name)
