"""The whole configuration: a tree of sections with flat keys as leaves."""

from MaxText.config import data_sections, model_sections, training_sections
from MaxText.config.keys import Section

SCHEMA_VERSION = 1


class Config(Section):
    """A resolved configuration. Each key is owned by exactly one section."""

    run: training_sections.RunConfig = training_sections.RunConfig()
    model: model_sections.ModelConfig = model_sections.ModelConfig()
    batch: training_sections.BatchConfig = training_sections.BatchConfig()
    data: data_sections.DataConfig = data_sections.DataConfig()
    masking: data_sections.MaskingConfig = data_sections.MaskingConfig()
    preparation: data_sections.PreparationConfig = data_sections.PreparationConfig()
    optimizer: training_sections.OptimizerConfig = training_sections.OptimizerConfig()
    schedule: training_sections.ScheduleConfig = training_sections.ScheduleConfig()
    mesh: training_sections.MeshConfig = training_sections.MeshConfig()
    checkpoint: training_sections.CheckpointingConfig = training_sections.CheckpointingConfig()
    evaluation: training_sections.EvaluationConfig = training_sections.EvaluationConfig()
    scoring: training_sections.ScoringConfig = training_sections.ScoringConfig()
    decoding: training_sections.DecodingConfig = training_sections.DecodingConfig()
    monitoring: training_sections.MonitoringConfig = training_sections.MonitoringConfig()
    guard: training_sections.GuardConfig = training_sections.GuardConfig()
