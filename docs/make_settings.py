"""Writes docs/settings.md from the settings classes, so that it cannot go out of date: python docs/make_settings.py"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

from headway.configuration import TokenizerSettings
from headway.models import MODELS
from headway.models.attentions import KINDS, OWN_SETTINGS, AttentionSettings
from headway.settings import REQUIRED, toml_value
from headway.tasks import TASKS
from headway.training.stage import StreamSettings, TrainingSettings

HEAD = """# Settings

Everything a run file may say, with its default. `headway train FILE --set section.key=value` overrides any of it, and
`--set section.key=` takes what the file says there away.
Sections: `[tokenizer]`, `[model]`, `[task]`, `[training]`, and for an earlier stage on the same model
`[pretraining.task]` and `[pretraining.training]`, which take the same keys as `[task]` and `[training]`.
`[streams.NAME]` with `[streams.NAME.task]` is something learned beside the task, in the same steps.
Paths are relative to the run file, those given with `--set` to where you are; `data:NAME/FILE` names a file of a data
set (`headway data list`).

A run file needs no more than this:

```toml
[task]
name = "language_modelling"
corpus = "notes.txt"
[training]
steps = 500
```

(This page is written by `python docs/make_settings.py`.)
"""


def section(title: str, cls: type) -> str:
    rows = [f"\n## {title}\n", "| key | default | what it is |", "| --- | --- | --- |"]
    for field in dataclasses.fields(cls):
        choices = field.metadata["choices"]
        meaning = field.metadata["help"] + (f" ({', '.join(choices)})" if choices else "")
        rows.append(f"| `{field.name}` | {default(field)} | {meaning.replace('|', '&#124;')} |")
    return "\n".join(rows) + "\n"


def attentions() -> str:
    """The kinds of `[model.attention]`: those that have no settings in one line, the others in a table each."""
    plain = [f"`{kind}`" for kind, cls in KINDS.items() if cls is AttentionSettings and kind != "linformer"]
    parts = [
        '\n## `[model.attention]`\n\nWhich attention the layers use: `attention = "local"` in `[model]`, or a table '
        f"with the settings below. Without settings of their own: {', '.join(plain)}.\n"
    ]
    for kind, cls in OWN_SETTINGS.items():
        own = section(f'`[model.attention]` kind = "{kind}"', cls)
        parts.append(own.replace(f'| `kind` | `"{cls.kind}"` |', f'| `kind` | `"{kind}"` |'))
    return "".join(parts)


def default(field: dataclasses.Field[typing.Any]) -> str:
    if field.default is REQUIRED:
        return "*required*"
    return "–" if field.default is None else f"`{toml_value(plain_value(field.default))}`"


def plain_value(value: typing.Any) -> typing.Any:
    return list(value) if isinstance(value, tuple) else value


def settings_page() -> str:
    parts = [HEAD, section("`[tokenizer]`", TokenizerSettings)]
    parts += [section(f'`[model]` kind = "{kind}"', cls) for kind, cls in MODELS.items()]
    parts.append(attentions())
    parts += [section(f'`[task]` name = "{name}"', cls) for name, cls in TASKS.items()]
    parts.append(section("`[training]`", TrainingSettings))
    return "".join([*parts, section("`[streams.NAME]`", StreamSettings)])


if __name__ == "__main__":
    Path(__file__).with_name("settings.md").write_text(settings_page(), encoding="utf-8")
