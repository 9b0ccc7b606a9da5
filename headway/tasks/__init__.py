"""What is learned and how it is scored.

`TASKS` is what `[task] name` may say. A task's settings read its texts (`texts`) and build it (`build`); the task makes
batches and scores models (`headway.tasks.base.Task`). Settings of a task whose rows are written after a source was read
say `reads_source = True`, as do those of the models for it.
"""

from headway.tasks.base import IGNORE, Batch, Task
from headway.tasks.entity_spans import EntitySpans, EntitySpansSettings
from headway.tasks.language_modelling import LanguageModelling, LanguageModellingSettings
from headway.tasks.question_answering import Answer, QuestionAnswering, QuestionAnsweringSettings
from headway.tasks.recitation import Recitation, RecitationSettings
from headway.tasks.retelling import Retelling, RetellingSettings
from headway.tasks.sequence_to_sequence import Alignment, SequenceToSequence, SequenceToSequenceSettings, Translation
from headway.tasks.span_corruption import SpanCorruption, SpanCorruptionSettings
from headway.tasks.toy import ToySettings

TASKS = {
    "language_modelling": LanguageModellingSettings,
    "span_corruption": SpanCorruptionSettings,
    "retelling": RetellingSettings,
    "entity_spans": EntitySpansSettings,
    "recitation": RecitationSettings,
    "question_answering": QuestionAnsweringSettings,
    "sequence_to_sequence": SequenceToSequenceSettings,
    "toy": ToySettings,
}

__all__ = [
    "IGNORE",
    "TASKS",
    "Alignment",
    "Answer",
    "Batch",
    "EntitySpans",
    "EntitySpansSettings",
    "LanguageModelling",
    "LanguageModellingSettings",
    "QuestionAnswering",
    "QuestionAnsweringSettings",
    "Recitation",
    "RecitationSettings",
    "Retelling",
    "RetellingSettings",
    "SequenceToSequence",
    "SequenceToSequenceSettings",
    "SpanCorruption",
    "SpanCorruptionSettings",
    "Task",
    "ToySettings",
    "Translation",
]
