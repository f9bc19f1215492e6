"""Input pipeline: from text or token files to the batches of a training or evaluation step.

Words, in the order in which a batch is made from them. The code uses each in this sense only:

document
  One text, as ids. A dataset is a list of documents. `document_offsets` holds the first token of
  each and the end of the last.
token store
  Flat files of ids with random access to ranges of tokens (`token_store/store.py`).
token dataset
  One split of a dataset, opened: its token store, padding id, special ids and fingerprint
  (`TokenDataset`).
sequence
  One training example: `max_target_length` tokens, their targets and weights. A `SequenceSlicer`
  says which ranges of tokens form the sequences of a token dataset. User-facing keys and messages
  call sequences of the training data samples, as in `excluded_samples`.
token range
  Consecutive tokens of one sequence that are also consecutive in the store.
sequence index
  Position of a sequence among those of one token dataset, in [0, len(slicer)). It is independent of
  seed and epoch.
order index
  Position of a sequence in an order: of one dataset over all of its epochs, shuffled
  (`OrderedSequences`), or of a run over all of its datasets (`SequenceDataset`). Excluded samples,
  data positions and masks are given by order indices of the run.
read index
  Position of a sequence among those that a run reads: the order index without the excluded ones.
step
  Index of a batch, from 0.
batch
  The sequences of one step over all processes (the global batch), or the shard of one process.
row
  Index of a sequence in the arrays [B, T] of a batch. With `sequence_length_stages`, a sequence may
  be split into several rows.
shard
  The consecutive sequences of a batch that one process reads (`BatchShard`). Concatenated in the
  order of processes, the shards are the global batch.
source
  An opened dataset with its sequences in order (`OpenDataSource`); a run may mix several. The
  `BatchSource` returns the batch of any step.
data source
  A user's class that gives documents or records (`data_source.py`). It is read through a token
  store, as files are (`registered_sources/`).

The way of a batch:

    manifest, opening      finds and opens the files of a token dataset
    slicing, packing, ...  token dataset -> sequences by sequence index
    order                  order index -> dataset and sequence index
    batch_schedule         step -> number of sequences and their length
    batch_source           step -> order indices -> arrays of this process's shard
    batch_arrays           token ranges -> arrays [B, T]
    prefetch               reads ahead in threads or processes; retries
    iterator, loader       batches for the training loop, from any step
"""
