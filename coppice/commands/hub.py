"""What `coppice up MODEL` names: a folder, or a model of the Hugging Face Hub, which is fetched into its cache."""

from __future__ import annotations

from pathlib import Path

from coppice.config.settings import load_settings
from coppice.errors import InvalidField

# Weights that run no code, and what configures the model, its tokenizer and its chat template; in its main folder only,
# and without Mistral's second copy of the weights.
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
UNWANTED = ("*/*", "consolidated*")


def find_model(model: str | None, target: Path | None, revision: str | None) -> tuple[Path | None, str]:
    """The folder of what MODEL or --target names, and its name if it is the Hub's. Raises InvalidField."""
    if model and target:
        raise InvalidField("MODEL", "is the same thing as --target: give one of them")
    if model and not Path(model).exists():
        return _fetch(model, revision), model
    if revision:
        raise InvalidField("revision", "is a MODEL's of the Hub, and none is named")
    return Path(model) if model else target, ""


def _fetch(model: str, revision: str | None) -> Path:
    """The folder of a snapshot; what the cache lacks of it is downloaded, with progress on stderr."""
    if load_settings([]).server.production:
        raise InvalidField("MODEL", f"{model} is no folder, and in production (server.production) nothing is fetched")
    from huggingface_hub import constants, errors, snapshot_download

    hub = constants.ENDPOINT
    try:
        fetched = snapshot_download(
            model, revision=revision, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED)
        )
    except errors.HFValidationError:
        why = "is neither a folder nor a name such as Qwen/Qwen3-8B"
    except errors.GatedRepoError:
        why = f"is for those whom its owner grants access at {hub}; HF_TOKEN says who you are"
    except errors.RepositoryNotFoundError:
        why = f"is no folder, and no model at {hub} that you may read (HF_TOKEN says who you are)"
    except errors.RevisionNotFoundError:
        raise InvalidField("revision", f"{model} has no revision {revision}") from None
    except errors.LocalEntryNotFoundError:
        why = f"is no folder, the cache does not hold it whole, and {hub} does not answer"
    except Exception as error:  # of its HTTP client, which is not the same in all versions, and of the disk
        why = f"could not be fetched from {hub}: {' '.join(str(error).split())}"
    else:
        if any(Path(fetched).glob("*.safetensors")):
            return Path(fetched)
        why = "has no weights as safetensors, and no others are loaded"
    raise InvalidField("MODEL", f"{model} {why}")
