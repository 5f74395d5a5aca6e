"""Weights of trained models, from folders in the layout of the Hugging Face hub.

A folder has `config.json`, and `model.safetensors` or several files that
`model.safetensors.index.json` lists. The model is constructed without values, and its parameters
are read one by one. `jattn.nn.families` lists the supported models.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype
from jax.dtypes import canonicalize_dtype

from jattn.checks import check_dtype, check_size, shown
from jattn.nn.families import FAMILIES, Config, Family


_LEAVES = {name: "weight" for name in ("kernel", "scale", "embedding")}
_DTYPES: dict[str, Any] = {
    "BF16": jnp.bfloat16,
    "F16": jnp.float16,
    "F32": jnp.float32,
    "F64": jnp.float64,
}
# Tensors that are not parameters: frequencies, causal masks and sinusoids of old files.
_CONSTANTS = re.compile(
    r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|embed_positions\.weight$|position_ids$"
)
# Tensors that some files have for matrices that are tied; they must equal the embedding.
_COPIES = re.compile(r"(lm_head|embed_tokens|shared)\.weight$")


class _Tensors:
    """The tensors of a folder's files, by name.

    If no name starts with `prefix`, as in files without an output projection, all names get it.
    """

    def __init__(self, folder: Path, open_files: contextlib.ExitStack, prefix: str):
        self._open_files = open_files
        files = self._opened_files(folder)
        has_prefix = any(name.startswith(prefix) for name in files)
        self.stored = {name if has_prefix else prefix + name: name for name in files}
        self.files = {name: files[stored] for name, stored in self.stored.items()}

    def _opened_files(self, folder: Path) -> dict[str, Any]:
        """Opens the files, and returns the file of each tensor."""
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.exists():
            file = self._opened(single)
            return dict.fromkeys(file.keys(), file)
        if not index.exists():
            raise FileNotFoundError(
                f"{folder}: expected {single.name} or {index.name}, got "
                f"{sorted(x.name for x in folder.iterdir())}"
            )
        weights = _read_json(index).get("weight_map", {})
        is_map = isinstance(weights, dict) and all(isinstance(x, str) for x in weights.values())
        if not is_map or any(not x or Path(x).name != x for x in weights.values()):
            raise ValueError(f"{index}: expected weight_map with names of files in the folder")
        files = {name: self._opened(folder / name) for name in {*weights.values()}}
        keys = {name: {*file.keys()} for name, file in files.items()}
        if absent := [name for name, file in weights.items() if name not in keys[file]]:
            raise ValueError(f"{index}: {_listed(absent)} are not in their files")
        return {name: files[file] for name, file in weights.items()}

    def _opened(self, path: Path) -> Any:
        """Opens a file; raises ValueError for a file that is damaged."""
        try:
            safetensors: Any = importlib.import_module("safetensors")
        except ImportError as error:
            message = 'from_safetensors needs safetensors: pip install "jattn[weights]"'
            raise ImportError(message) from error
        if not path.exists():
            raise FileNotFoundError(f"{path}: this file of the index does not exist")
        try:
            return self._open_files.enter_context(safetensors.safe_open(path, framework="numpy"))
        except OSError as error:
            raise ValueError(f"{path}: not a readable file: {error}") from error
        except safetensors.SafetensorError as error:
            with path.open("rb") as file:
                is_pointer = file.read(40).startswith(b"version https://git-lfs")
            reason = "it is a pointer of Git LFS, fetch the file itself" if is_pointer else error
            raise ValueError(f"{path}: not a whole safetensors file: {reason}") from error

    def __getitem__(self, name: str) -> np.ndarray:
        return self.files[name].get_tensor(self.stored[name])

    def _slice(self, name: str) -> Any:
        return self.files[name].get_slice(self.stored[name])

    def shape(self, name: str) -> list[int]:
        """Returns the shape of a tensor, without reading it."""
        return self._slice(name).get_shape()

    def dtype(self, name: str) -> Any:
        """Returns the dtype of a tensor; raises NotImplementedError for a quantised one."""
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            raise NotImplementedError(
                f"{name}: expected a dtype of {', '.join(_DTYPES)}, got {stored}"
            )
        return _DTYPES[stored]


@dataclasses.dataclass(frozen=True)
class _Source:
    """The tensor that has the values of a parameter.

    name: the name of the tensor.
    part: which third of the tensor's last axis, if it holds queries, keys and values; else None.
    shape: the shape of the parameter.
    num_inputs: the number of input axes of a kernel; 0 for vectors, None for embeddings
        and the output projection.
    transposed: whether the tensor of a kernel is `[out, in]`.
    """

    name: str
    part: int | None
    shape: tuple[int, ...]
    num_inputs: int | None
    transposed: bool

    @property
    def stored_shape(self) -> list[int]:
        """The shape of the tensor."""
        if self.num_inputs is None:
            return [*self.shape]
        inputs, outputs = self.shape[: self.num_inputs], self.shape[self.num_inputs :]
        sizes = [math.prod(inputs), math.prod(outputs) * (1 if self.part is None else 3)]
        return (sizes[::-1] if self.transposed else sizes) if inputs else sizes[1:]

    def read(self, tensors: _Tensors) -> np.ndarray:
        """Returns the values of the parameter."""
        tensor = tensors[self.name]
        if self.num_inputs and self.transposed:
            tensor = tensor.T
        if self.part is not None:
            tensor = np.split(tensor, 3, axis=-1)[self.part]
        return tensor.reshape(self.shape)


def _tensor_names(family: Family, path: tuple[Any, ...]) -> list[str]:
    """Returns the names that the tensor of a parameter may have, with `#i` for part i of it."""
    *modules, leaf = map(str, path)
    module = re.sub(r"(?<=layers/)\d+", "*", "/".join(modules))
    number = next((x for x in modules if x.isdigit()), "")
    if stored := family.names.get(f"{module}/{leaf}"):
        return [stored]
    names = []
    for alternative in family.names.get(module, ".".join(modules)).split("|"):
        name, mark, part = alternative.replace("*", number).partition("#")
        names.append(f"{name}.{_LEAVES.get(leaf, leaf)}{mark}{part}")
    return names


def _source(family: Family, path: tuple[Any, ...], shape: Any, names: Mapping[str, Any]) -> _Source:
    """Returns the source of a parameter: of the names that it may have, the first that exists."""
    candidates = _tensor_names(family, path)
    existing = (x for x in candidates if x.partition("#")[0] in names)
    name, _, part = next(existing, candidates[0]).partition("#")
    leaf, is_output = path[-1], path[0] == "output"
    num_inputs = 0
    if leaf == "embedding" or (leaf == "kernel" and is_output):
        num_inputs = None
    elif leaf == "kernel":
        num_inputs = 2 if path[-2] == "out" and str(path[-3]).endswith("attention") else 1
    return _Source(name, int(part) if part else None, shape, num_inputs, family.transposed)


def _matched(family: Family, shapes: dict[Any, Any], tensors: _Tensors) -> dict[Any, _Source]:
    """Returns the source of each parameter, by path.

    Raises ValueError for missing and unexpected tensors, and for tensors of a wrong shape.
    """
    sources = {path: _source(family, path, x, tensors.files) for path, x in shapes.items()}
    used = {source.name for source in sources.values()}
    missing = sorted(used - tensors.files.keys())
    extra = sorted(x for x in tensors.files.keys() - used if not _CONSTANTS.search(x))
    if not missing:
        tables = [x.name for path, x in sources.items() if path[-1] == "embedding"]
        extra = [x for x in extra if not _is_copy(x, tables, tensors)]
    if missing or extra:
        raise ValueError(
            "the tensors do not fit config.json: "
            f"missing {_listed(missing)}; unexpected {_listed(extra)}"
        )
    for source in sources.values():
        tensors.dtype(source.name)
        wanted, shape = source.stored_shape, tensors.shape(source.name)
        if shape not in (wanted, [1, *wanted]):
            raise ValueError(
                f"{source.name}: expected shape {wanted}, as config.json says, got {shape}"
            )
    return sources


def _is_copy(name: str, tables: list[str], tensors: _Tensors) -> bool:
    """Returns whether a tensor that is tied to an embedding equals it."""
    if not _COPIES.search(name):
        return False
    return any(
        tensors.shape(name) == tensors.shape(x) and np.array_equal(tensors[name], tensors[x])
        for x in tables
    )


def _listed(names: list[str]) -> str:
    """Returns some of the names, for a message."""
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(names[:8]) or "none") + rest


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises ValueError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _family_of(kind: Any, model_class: Any) -> Family:
    """Returns the family of a `model_type`; raises an error unless it is one of the class."""
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise NotImplementedError(
            f"config.json: model_type {kind!r} is not supported, only {', '.join(FAMILIES)}"
        )
    if family.model not in {x.__name__ for x in model_class.mro()}:
        raise ValueError(
            f"config.json: a model of type {kind!r} is an nn.{family.model}; call "
            f"nn.{family.model}.from_safetensors"
        )
    return family


def load(
    model_class: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: Dtype | None = None,
    dropout_rate: float = 0.0,
    length: int | None = None,
    ignored: Iterable[str] = (),
    mesh: jax.sharding.Mesh | None = None,
) -> Any:
    """Constructs a model with the weights of a folder, for the methods `from_safetensors`."""
    folder = Path(folder)
    if dtype is not None:
        check_dtype("dtype", dtype)
    if length is not None:
        check_size("length", length)
    if isinstance(ignored, str):
        raise TypeError(f"ignored: expected a list of names, got {ignored!r}")
    if not folder.is_dir():
        raise FileNotFoundError(f"folder: expected a folder, found none at {folder}")
    if not (mesh is None or isinstance(mesh, jax.sharding.Mesh)):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh, got {shown(mesh)}")
    options = _read_json(folder / "config.json")
    family = _family_of(options.get("model_type"), model_class)
    with contextlib.ExitStack() as open_files:
        tensors = _Tensors(folder, open_files, family.prefix)
        config = Config(options, tensors.files, length, {*ignored})
        try:
            arguments = family.arguments(config) | {"dropout_rate": dropout_rate}
        except (TypeError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(f"config.json: an option has a wrong value: {error}") from error
        config.check_all_used()
        dtype = canonicalize_dtype(_stored_dtype(family, tensors) if dtype is None else dtype)
        make = lambda: model_class(**arguments, param_dtype=dtype, rngs=nnx.Rngs(0))  # noqa: E731
        return _with_values(make, family, tensors, dtype, mesh)


def _stored_dtype(family: Family, tensors: _Tensors) -> Any:
    """Returns the dtype of the embedding in the files; float32 if there is none."""
    module = next(x for x in ("tokens", "target_tokens") if x in family.names)
    name = _source(family, (module, "embedding"), (), tensors.files).name
    return tensors.dtype(name) if name in tensors.files else jnp.float32


def _with_values(make: Any, family: Family, tensors: _Tensors, dtype: Any, mesh: Any) -> Any:
    """Makes a model without values, and reads its parameters one by one."""
    model = nnx.eval_shape(make)
    state = nnx.state(model, nnx.Param)
    sources = _matched(
        family, {x: y.get_value().shape for x, y in nnx.to_flat_state(state)}, tensors
    )
    specs = dict(nnx.to_flat_state(nnx.get_partition_spec(state)))
    if mesh is not None:
        _check_axes(mesh, specs)
    values = {}
    for path, source in sources.items():
        with np.errstate(over="ignore"):
            stored = source.read(tensors)
            value = np.asarray(stored, dtype)
        if np.any(np.isinf(value) & np.isfinite(stored)):
            raise ValueError(f"{source.name}: expected numbers that fit {np.dtype(dtype)}")
        if mesh is None:
            values[path] = jnp.asarray(value)
        else:
            sharding = jax.sharding.NamedSharding(mesh, specs[path].get_value())
            values[path] = jax.device_put(value, sharding)
    nnx.update(model, nnx.traversals.unflatten_mapping(values))
    return model


def _check_axes(mesh: Any, specs: dict[Any, Any]) -> None:
    """Raises ValueError for axes of parameters that are neither mapped to the mesh nor to None."""
    axes = [axis for spec in specs.values() for axis in spec.get_value()]
    names = {name for x in axes for name in (x if isinstance(x, tuple) else (x,))} - {None}
    if unknown := sorted(names - {*mesh.axis_names}):
        raise ValueError(
            f"mesh: expected axes {unknown} to be mapped to {mesh.axis_names} or None by "
            "nnx.logical_axis_rules, with a rule for each of nn.LOGICAL_AXES"
        )
