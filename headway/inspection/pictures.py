"""A picture of where a run's model looks: the target against the source, or a text against itself.

SVG is written by hand and follows the light or dark theme of whoever shows it; PNG is drawn by matplotlib.
"""

from __future__ import annotations

import io
import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.errors import TextError, UserError
from headway.files import write_output
from headway.inspection.attention import capture_attention
from headway.models import RNNSeq2Seq
from headway.report.charts import weight_map
from headway.report.page import svg_file
from headway.run import Run
from headway.tasks import SequenceToSequence
from headway.text import Tokenizer

PICTURES = (".svg", ".png")
CELL, LONGEST = 0.32, 40.0  # inches of a .png: a side of a cell, and at most all cells of a side
UNSEEN = {code: 0x2400 + code for code in range(32)} | {0x7F: 0x2421, 0xFFFE: 0xFFFD, 0xFFFF: 0xFFFD}
EAST_ASIAN = ("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi", "Microsoft YaHei", "PingFang SC", "SimHei")


@dataclass(frozen=True)
class Map:
    """How much each row takes from each column, (rows, columns)."""

    weights: Sequence[Sequence[float]]
    rows: list[str]
    columns: list[str]
    down: str  # what the rows are
    across: str  # what the columns are

    @property
    def title(self) -> str:
        return f"{self.down} (down) looks at {self.across} (across)"


def attention_map(run: Run, text: str, target: str | None = None) -> Map:
    """Of a run that translates, what each token of the target looked at; else what each token of the text looked at."""
    if isinstance(run.task, SequenceToSequence):
        found = run.task.alignment(run.model, text, target)
        if found is None:
            raise UserError(
                f"{run.path}: this {run.settings.model.kind} looks at no token of the source; it has one vector for "
                "the whole of it (model.attention = 'none'): train with another attention to see an alignment"
            )
        rows, columns = names(run.tokenizer, found.target[:-1]), names(run.tokenizer, found.source)
        where = "source" if isinstance(run.model, RNNSeq2Seq) else "source, in the last layer, mean of its heads"
        return Map(found.weights, [*rows, "end"], columns, "target", where)
    if target is not None:
        raise UserError(f"--target: a run whose task is {run.settings.task.name} has no source beside its target")
    if not text:
        raise TextError("there is nothing to look at in an empty text; give it some")
    tokens = run.tokenizer.encode_alone(text)
    if len(tokens) > run.model.context:
        raise TextError(f"the text has {len(tokens)} tokens, and the model holds {run.model.context} (model.block)")
    weights = capture_attention(run.model, tokens)[-1].mean(0).tolist()
    causal = [row[: number + 1] for number, row in enumerate(weights)]
    labels = names(run.tokenizer, tokens)
    return Map(causal, labels, labels, "a token", "those up to itself, in the last layer, mean of its heads")


def names(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Tokens as they may stand beside a row: without the space in front, and a mere space as ␣.

    A control character is shown by its picture: SVG may not hold it, and nobody would see it.
    """
    return [tokenizer.decode([token], specials=True).strip().translate(UNSEEN) or "␣" for token in tokens]


def require_picture(out: Path) -> None:
    if out.suffix not in PICTURES:
        raise UserError(f"--out {out}: a picture ends in {' or '.join(PICTURES)}")


def write_map(picture: Map, out: Path) -> list[str]:
    """Write the picture; returns what should be known of it."""
    require_picture(out)
    if out.suffix == ".svg":
        write_output(out, svg_file(weight_map(picture.weights, picture.rows, picture.columns, picture.title)))
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import font_manager, pyplot

    broad = any(unicodedata.east_asian_width(each) in "WF" for each in "".join(picture.rows + picture.columns))
    installed = [font.name for font in font_manager.fontManager.ttflist]
    fonts = [name for wanted in EAST_ASIAN for name in installed if name.startswith(wanted)] if broad else []
    full = [[*row, *[float("nan")] * (len(picture.columns) - len(row))] for row in picture.weights]
    cell = min(CELL, LONGEST / max(len(picture.columns), len(picture.rows)))
    letters = 9 * cell / CELL
    size = 1.5 + cell * len(picture.columns), 1.5 + cell * len(picture.rows)
    with matplotlib.rc_context({"font.family": [*fonts[:1], "DejaVu Sans"], "text.parse_math": False}):
        drawn, axes = pyplot.subplots(figsize=size, layout="constrained")
        axes.imshow(full, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(picture.columns)), picture.columns, rotation=90, fontsize=letters)
        axes.set_yticks(range(len(picture.rows)), picture.rows, fontsize=letters)
        axes.set(xlabel=picture.across, ylabel=picture.down)
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            drawn.savefig(buffer, format="png", dpi=150)
        pyplot.close(drawn)
    write_output(out, buffer.getvalue())
    notes = []
    if broad and not fonts:
        notes.append("no font on this machine shows these characters, and boxes stand for them; write an .svg instead")
    if cell < CELL:
        notes.append(f"{len(picture.rows)} by {len(picture.columns)} tokens are drawn small; write an .svg instead")
    return [f"{out}: {note}" for note in notes]
