"""Refuse what cannot work before any work starts, naming the nearest valid names.

Hydra refuses unknown groups and keys too, but lists everything there is, or nothing; and what
`optimus.patterns=` and `optimus.disable=` may be it cannot know.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import numbers
from conf.resolvers import default_knobs
from optimus.ablation import case
from optimus.explain import names_to_explain
from optimus.pipeline import patterns_by_name, select
from recsys.data.criteo_files import WANTED
from recsys.optim import DENSE_OPTIMIZERS, SPARSE_OPTIMIZERS, OptimizerConfig

CONF = Path(__file__).parent


class UserError(SystemExit):
    """Something to tell the user in one line: ends the program with it, without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"train.py: {message}")


def check_command_line(arguments: Sequence[str]) -> None:
    """Raise UserError for overrides that name an unknown group, option, key or pattern.

    `arguments` are those of the program. All values of a sweep are looked at, so that no job starts
    when a later one cannot. With --config-dir, -cp or -cn there may be more than `conf` holds: then
    Hydra alone judges groups and keys.
    """
    overrides = list(_overrides(arguments))
    if not any(_names_other_configs(argument) for argument in arguments):
        options = group_options()
        for override in overrides:
            if override.key_or_group in options:
                _check_group(override, options[override.key_or_group])
        _check_keys(overrides, arguments)
    for override in overrides:
        _check_patterns(override)


def check(cfg: DictConfig) -> None:
    """Raise UserError for a composed configuration that cannot work."""
    for key in sorted(OmegaConf.missing_keys(cfg)):
        what = WANTED if key == "data.path" else f"see {CONF / key.split('.')[0]}"
        raise UserError(f"{key} is not given, add {key}=...: {what}")
    with told(ValueError, TypeError, OmegaConfBaseException):
        plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        numbers.check(plain)
        for group in ("sparse_optimizer", "dense_optimizer"):
            _check_optimizer(group, plain[group])
        optimus = plain["optimus"]
        if optimus is not None:
            select(optimus["patterns"], optimus["disable"], optimus["knobs"])
            names_to_explain(optimus["explain"])
    if not cfg.test and cfg.metric.startswith("test/"):
        raise UserError(f"test=false leaves no {cfg.metric}: set metric=val/auc, say")


def _check_optimizer(group: str, config: Mapping[str, Any]) -> None:
    valid = SPARSE_OPTIMIZERS if group == "sparse_optimizer" else DENSE_OPTIMIZERS
    if config["name"] not in valid:
        name = config["name"]
        raise UserError(f"{group}.name: unknown optimizer {name!r}, {nearest(str(name), valid)}")
    try:
        OptimizerConfig.of(config)
    except ValueError as error:
        raise UserError(f"{group}: {error}") from error


@contextlib.contextmanager
def told(*errors: type[BaseException]) -> Iterator[None]:
    """Turn `errors`, whose messages are written for the user, into UserError.

    With HYDRA_FULL_ERROR=1 in the environment they pass, with their tracebacks.
    """
    try:
        yield
    except errors as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        cause = error.__cause__ if isinstance(error, InstantiationException) else None
        raise UserError(str(cause or error).strip()) from error


def nearest(name: str, valid: Iterable[str], everything: bool = True) -> str:
    """'did you mean ...?' for a misspelt name, and what there is when nothing is near."""
    valid = sorted(valid)
    near = difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else ""
    return " ".join(filter(None, [hint, f"(valid: {', '.join(valid)})" if everything else ""]))


def group_options() -> dict[str, list[str]]:
    """Options of each group of `conf`."""
    groups = [folder for folder in CONF.iterdir() if any(folder.glob("*.yaml"))]
    return {group.name: sorted(f.stem for f in group.glob("*.yaml")) for group in groups}


def _overrides(arguments: Sequence[str]) -> Iterator[Override]:
    words = [a for a in arguments if "=" in a and not a.startswith("-")]
    try:
        yield from OverridesParser.create().parse_overrides(words)
    except HydraException as error:
        raise UserError(_first_line(error)) from error


def _names_other_configs(argument: str) -> bool:
    return argument.startswith(("--config-", "-cd", "-cp", "-cn"))


def _check_group(override: Override, options: Sequence[str]) -> None:
    for value in _values(override):
        names = value if isinstance(value, list) else [value]
        for name in names:
            if name is not None and str(name) not in options:
                group = override.key_or_group
                raise UserError(f"unknown {group} {str(name)!r}: {nearest(str(name), options)}")


def _check_keys(overrides: Sequence[Override], arguments: Sequence[str]) -> None:
    groups = group_options()
    plain = [o for o in overrides if not (o.is_add() or o.is_force_add() or o.is_delete())]
    chosen = [o for o in plain if o.key_or_group in groups]
    keys = [o.key_or_group for o in plain if o.key_or_group.split(".")[0] != "hydra"]
    unknown = [key for key in keys if key not in groups and "/" not in key and "@" not in key]
    if not unknown:
        return
    known = set(_known_keys(chosen))
    for key in unknown:
        if key.startswith(_KNOBS):
            _check_knob(key.removeprefix(_KNOBS))
        elif key not in known:
            near = nearest(key, known, everything=False) or f"see {CONF}/config.yaml for what is"
            raise UserError(f"unknown key {key!r}: {near}")


_KNOBS = "optimus.knobs."


def _check_knob(key: str) -> None:
    """Refuse `PATTERN.KNOB` that there is not, naming patterns, or knobs of that pattern alone."""
    knobs = default_knobs()
    pattern, _, knob = key.partition(".")
    if pattern not in patterns_by_name():
        hint = nearest(pattern, knobs, everything=False) or nearest(pattern, knobs)
        raise UserError(f"{_KNOBS}{key}: unknown pattern {pattern!r}, {hint}")
    if pattern not in knobs:
        raise UserError(f"pattern {pattern!r} has no knobs, so {knob!r} is none of them")
    if knob and knob not in knobs[pattern]:
        raise UserError(
            f"pattern {pattern!r} has no knob {knob!r}: {nearest(knob, knobs[pattern])}"
        )


def _known_keys(chosen: Sequence[Override]) -> Iterator[str]:
    """Keys of the configurations that `chosen` options give; of a sweep, the first value's too."""
    words = [f"{o.key_or_group}={next(iter(_values(o)))}" for o in chosen]
    words = [word for word in words if not word.endswith("=None")]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield from _dotted(compose("config", overrides=words))


def _dotted(node: Any, prefix: str = "") -> Iterator[str]:
    for key in node:
        yield f"{prefix}{key}"
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            yield from _dotted(child, f"{prefix}{key}.")


def _check_patterns(override: Override) -> None:
    key = override.key_or_group
    if key not in {"optimus.patterns", "optimus.disable", "optimus.explain", "case"}:
        return
    for value in _values(override):
        try:
            if key == "case":
                case(str(value))
            elif key == "optimus.patterns":
                select(value)
            elif key == "optimus.explain":
                names_to_explain(value)
            else:
                select("all", disable=value or ())
        except (ValueError, TypeError) as error:
            raise UserError(f"{key}: {_first_line(error)}") from error


def _values(override: Override) -> Iterator[Any]:
    """All values of an override, of a sweep one after the other."""
    if override.is_sweep_override():
        yield from (_plain(value) for value in override.sweep_iterator(transformer=lambda x: x))
    else:
        yield _plain(override.value())


def _plain(value: Any) -> Any:
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
