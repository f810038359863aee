"""W&B as a view of the run: one run a job, rank 0 only, offline without key or network, and never able to end a run."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal


class Dashboard:
    """Sends records to W&B. Any failure is said once on stderr, and the run goes on without the dashboard."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._run: Any = None
        self._run = self._guard(start)

    @property
    def on(self) -> bool:
        return self._run is not None

    def log(self, values: Mapping[str, Any], axes: Mapping[str, Any]) -> None:
        """`values` are named split/name; `axes` holds step, images, epoch and attempt, which every record carries."""
        if self._run is not None:
            axes = {name: axes[name] for name in ("step", "images", "epoch", "attempt")}
            self._guard(lambda: self._run.log(dict(values) | axes))

    def close(self, *, status: int) -> None:
        if self._run is not None:
            self._guard(lambda: self._run.finish(exit_code=status))
            self._run = None

    def _guard(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # whatever W&B raises, training does not depend on it
            self._run = None
            print(f"vitfw: W&B failed and is off for the rest of this run: {error}", file=sys.stderr)
            return None


def start_wandb(
    folder: Path,
    *,
    run_id: str,
    project: str,
    entity: str | None,
    name: str | None,
    config: Mapping[str, Any],
    resume: Literal["allow", "never"] = "allow",
) -> Dashboard:
    """One W&B run with a stable id, so that a resumed job goes on in it; the optimiser step is the x axis of everything."""

    def start() -> Any:
        import wandb  # about a second, and only where it is asked for

        online = bool(os.environ.get("WANDB_API_KEY")) or _has_netrc_entry()
        mode = os.environ.get("WANDB_MODE") or ("online" if online else "offline")
        if mode == "offline":
            print(f"vitfw: W&B is offline (no key found); send later with: wandb sync {folder}/wandb/offline-run-*")
        run = wandb.init(
            project=project,
            entity=entity,
            name=name or folder.name,
            id=run_id,
            dir=str(folder),
            config=dict(config),
            resume=None if mode == "offline" else resume,  # offline there is nothing to ask
            mode=mode,  # pyright: ignore[reportArgumentType]
            settings=wandb.Settings(console="off", init_timeout=60),
        )
        run.define_metric("*", step_metric="step")
        return run

    return Dashboard(start)


def _has_netrc_entry() -> bool:
    path = Path.home() / ".netrc"
    return path.is_file() and "wandb" in path.read_text(encoding="utf-8", errors="ignore")
