"""Directories of safetensors files, as Hugging Face lays them out, written and read by pieces.

Writing, one tensor at a time is whole on rank 0, and one file's worth of them is in its memory.
Reading, a rank has one tensor at a time and keeps its block of it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import ConfigError
from autopar.ir.graph import TensorMeta
from autopar.runtime.gathering import load_state, whole_tensors
from autopar.runtime.surgery import Residents

if TYPE_CHECKING:
    from autopar.runtime.session import Session

_INDEX, _ONE_FILE = "model.safetensors.index.json", "model.safetensors"
_PARTIAL = ".partial"
_OWN_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?(\.partial)?")


class PretrainedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a directory by name; each is read when it is asked for.

    Args:
        folder: With ``model.safetensors.index.json``, or with safetensors files.

    Raises:
        ConfigError: There are none, or a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = _index(folder)
        self._file_of: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in _files(folder, index):
            with self._open(file) as handle:
                for name in handle.keys():  # noqa: SIM118  # a handle is no mapping
                    self._file_of[name] = file
                    self.shapes[name] = tuple(handle.get_slice(name).get_shape())
        lost = [name for name in index if name not in self.shapes]
        if lost:
            raise ConfigError(
                f"{folder} is not complete: its index names {len(lost)} tensors that no file has, "
                f"the first is {lost[0]!r}; write or fetch it again"
            )

    def __getitem__(self, name: str) -> torch.Tensor:
        with self._open(self._file_of[name]) as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _open(self, file: str) -> Any:  # noqa: ANN401  # the library has no types
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.folder / file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{self.folder / file} can't be read ({error}): it is missing or was cut off; "
                "write or fetch the directory again"
            ) from error


def opened(
    state_dict: Mapping[str, torch.Tensor] | str | Path | None,
) -> Mapping[str, torch.Tensor] | None:
    """A state dict as it is; the path of a directory as the tensors in it."""
    return PretrainedTensors(Path(state_dict)) if isinstance(state_dict, str | Path) else state_dict


def _index(folder: Path) -> dict[str, str]:
    """Tensor -> file by the directory's index; empty without one."""
    _library()
    index = folder / _INDEX
    return dict(json.loads(index.read_text())["weight_map"]) if index.is_file() else {}


def _files(folder: Path, index: Mapping[str, str]) -> list[str]:
    files = sorted(set(index.values()) or {file.name for file in folder.glob("*.safetensors")})
    if not files:
        raise ConfigError(
            f"{folder} has no *.safetensors files; give a directory that save_pretrained() wrote"
        )
    return files


def _library() -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "directories of safetensors files need the package safetensors; pip install safetensors"
        ) from error


def load(session: Session, folder: Path, *, strict: bool) -> tuple[list[str], list[str]]:
    """Copy a directory's tensors into this rank's parameters and buffers.

    Returns:
        Missing and unexpected names.

    Raises:
        ConfigError: Names or shapes are another model's; on every rank, before anything is changed.
    """
    tensors = PretrainedTensors(folder)
    metas = _metas(session.residents)
    for name, meta in metas.items():
        for alias in session.residents.names[name]:
            if tensors.shapes.get(alias, meta.shape) != meta.shape:
                raise ConfigError(
                    f"{folder}: {alias!r} has shape {tensors.shapes[alias]}, the model has "
                    f"{meta.shape}; give the weights of this model"
                )
    return load_state(session.residents, tensors, strict=strict)


def check_whole(state_dict: object) -> None:
    """Refuse shards where a library's own method would write them for whole tensors."""
    if isinstance(state_dict, Mapping):
        sharded = [name for name, value in state_dict.items() if isinstance(value, DTensor)]
        if sharded:
            raise ConfigError(
                f"save_pretrained(state_dict=...) has {len(sharded)} shards, the first is "
                f"{sharded[0]!r}; leave state_dict out, and every rank's part is written"
            )


def check_export_options(options: Mapping[str, object]) -> None:
    """Refuse options of a library's own method that would change what is written.

    Raises:
        ConfigError: One is set.
    """
    harmless = {"is_main_process", "state_dict", "token", "safe_serialization"}
    for name, value in options.items():
        if name not in harmless and value:
            raise ConfigError(
                f"save_pretrained({name}={value!r}) of a compiled model is not supported; leave it "
                "out, or pass state_dict=model.full_state_dict() on rank 0"
            )


def _metas(residents: Residents) -> dict[str, TensorMeta]:
    """Shape and dtype of all that belongs into a state dict, by first name."""
    metas = {name: spec.meta for name, spec in residents.store.every.items()}
    return metas | {name: residents.buffer_metas[name] for name in residents.saved_order}


def save(session: Session, model: torch.nn.Module, folder: Path, *, max_shard_bytes: int) -> None:
    """Write all parameters and saved buffers, and the model's configuration if it has one.

    Every rank must call it; rank 0 writes.

    Args:
        session: The model's.
        model: For its configuration, and for which name of a tied weight it wants to find.
        folder: Made if it is not there; weights that lie in it are replaced.
        max_shard_bytes: Most bytes of a file, unless one tensor alone has more.
    """
    _library()
    residents = session.residents
    names = {name: _saved_name(residents.names[name], model) for name in _metas(residents)}
    files = _packed(_metas(residents), max_shard_bytes)
    writer = _Writer(folder, files, names) if session.place.rank == 0 else None
    tensors = whole_tensors(residents, session.planned_programs, session.plan.mesh, session.place)
    for name, value in tensors:
        if writer is not None:
            writer.add(name, value)
    if writer is not None:
        writer.finish()
        _write_config(model, folder)
    if session.place.is_distributed:
        dist.barrier()


def _packed(metas: Mapping[str, TensorMeta], most_bytes: int) -> list[list[str]]:
    """First names of each file, in the model's order."""
    files: list[list[str]] = [[]]
    held = 0
    for name, meta in metas.items():
        size = meta.bytes
        if files[-1] and held + size > most_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def _saved_name(names: tuple[str, ...], model: torch.nn.Module) -> str:
    """The name of a tied weight that stays when a model library ties the others to it again."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return next((name for name in names if name not in tied), names[0])


class _Writer:
    """Files of tensors, each written when its last tensor has come.

    They get their names when all are written: a job that is killed leaves the old weights.
    """

    def __init__(self, folder: Path, files: list[list[str]], names: Mapping[str, str]) -> None:
        self._folder = folder
        self._files = [list(listed) for listed in files]
        self._names = names
        self._held: dict[str, torch.Tensor] = {}
        self._written: list[str] = []
        self._weight_map: dict[str, str] = {}
        self._bytes = 0
        self._count = len(files)
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, value: torch.Tensor) -> None:
        """The next tensor, in the order of the files."""
        from safetensors.torch import save_file

        self._held[self._names[name]] = value.contiguous()
        self._bytes += value.nbytes
        if name != self._files[0][-1]:
            return
        self._files.pop(0)
        position = len(self._written) + 1
        several = self._count > 1
        file = f"model-{position:05d}-of-{self._count:05d}.safetensors" if several else _ONE_FILE
        save_file(self._held, self._folder / (file + _PARTIAL), metadata={"format": "pt"})
        self._weight_map.update(dict.fromkeys(self._held, file))
        self._written.append(file)
        self._held = {}

    def finish(self) -> None:
        """Name the files, write the index, remove weights of an earlier export."""
        if self._count > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": self._weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._folder / (_INDEX + _PARTIAL)).write_text(text)
            self._written.append(_INDEX)
        for file in self._written:
            (self._folder / (file + _PARTIAL)).replace(self._folder / file)
        for path in self._folder.iterdir():
            if _OWN_FILES.fullmatch(path.name) and path.name not in self._written:
                path.unlink()


def _write_config(model: torch.nn.Module, folder: Path) -> None:
    """What a model library needs to build the model again, if it is from one."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        saved = copy.deepcopy(config)
        saved.architectures = [type(model).__name__]
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        if dtype is not None:
            saved.dtype = str(dtype).removeprefix("torch.")
        saved.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
