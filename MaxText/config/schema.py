"""The whole configuration: a tree of sections with flat keys as leaves."""

from MaxText.config import data_sections, inference_sections, model_sections, training_sections
from MaxText.config.keys import Section

SCHEMA_VERSION = 1


class Config(Section):
    """A resolved configuration. Each key is owned by exactly one section."""

    run: training_sections.Run = training_sections.Run()
    model: model_sections.Model = model_sections.Model()
    batch: training_sections.Batch = training_sections.Batch()
    data: data_sections.Data = data_sections.Data()
    masking: data_sections.Masking = data_sections.Masking()
    preparation: data_sections.Preparation = data_sections.Preparation()
    optimizer: training_sections.Optimizer = training_sections.Optimizer()
    schedule: training_sections.Schedule = training_sections.Schedule()
    mesh: training_sections.Mesh = training_sections.Mesh()
    checkpoint: training_sections.Checkpoint = training_sections.Checkpoint()
    evaluation: training_sections.Evaluation = training_sections.Evaluation()
    scoring: inference_sections.Scoring = inference_sections.Scoring()
    decoding: inference_sections.Decoding = inference_sections.Decoding()
    monitoring: training_sections.Monitoring = training_sections.Monitoring()
    guard: training_sections.Guard = training_sections.Guard()
