"""Experiments that use jattn through its public names only."""

import importlib.util


_NEEDED = "matplotlib optax orbax pydantic pygments sacrebleu starlette tokenizers tqdm uvicorn"

if missing := [name for name in _NEEDED.split() if importlib.util.find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"the experiments need {', '.join(missing)}; install everything that they need, in the "
        'folder of the clone, with: pip install -e ".[experiments]"'
    )
