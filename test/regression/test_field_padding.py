"""Padding of instructions: faults of other runtimes, each by its right behaviour."""

import numpy as np
import pytest
import torch
from field_rig import MANIFEST, OTHER_TASK, PIXELS, ROOT, TASK, VOCABULARY, tiny_vlm

from vla_cloud.context.runner import ContextRunner, PreparedObservation
from vla_common.manifest import load_manifest
from vla_models.text import PAD, tokenize
from vla_models.vlm import VlmConfig

PAD_ID = VOCABULARY.index(PAD)


def images(count):
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.integers(0, 256, (count, PIXELS, PIXELS, 3), dtype=np.uint8))


def ids_of(texts, length):
    return torch.tensor([tokenize(text, VOCABULARY, length) for text in texts])


@pytest.mark.parametrize("length", [6, 7, 12, 30])
def test_14_more_padding_changes_nothing(length):
    """Padding tokens that images and queries attend to (unmasked, or masked in training only): an instruction padded to
    another length gave other actions. With ``pad_id`` the context is the same, whatever the length."""
    vlm, pixels = tiny_vlm(pad_id=PAD_ID), images(2)
    with torch.no_grad():
        bare = vlm(ids_of([TASK, OTHER_TASK], 6), pixels)  # <bos>, four words, <sep>: no padding at all
        ids = ids_of([TASK, OTHER_TASK], length)
        padded = vlm(ids, pixels)
        reused = vlm.context(vlm.encode_text(ids), pixels, vlm.text_lengths(ids))
    torch.testing.assert_close(padded, bare, atol=1e-5, rtol=0)
    torch.testing.assert_close(reused, bare, atol=1e-5, rtol=0)
    assert (bare[0] - bare[1]).abs().max() > 0.01, "the words themselves show"


def test_14_a_batch_of_long_and_short_instructions_equals_one_by_one():
    """As above, in a batch: the short one is padded to the long one's length."""
    vlm, pixels = tiny_vlm(pad_id=PAD_ID), images(2)
    with torch.no_grad():
        together = vlm(ids_of(["touch", TASK], 6), pixels)
        alone = vlm(ids_of(["touch"], 3), pixels[:1])
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=0)


def test_14_what_stands_in_the_padding_does_not_matter():
    """As above: another vector for <pad> (an untrained one, in a foreign checkpoint) gives the same context."""
    vlm, pixels = tiny_vlm(pad_id=PAD_ID), images(1)
    ids = ids_of(["touch red"], 8)
    with torch.no_grad():
        before = vlm(ids, pixels)
        vlm.llama.embed_tokens.weight[PAD_ID] = 10.0
        torch.testing.assert_close(vlm(ids, pixels), before, atol=1e-5, rtol=0)


def test_14_the_service_masks_what_the_model_masks():
    """As above, with the prefix cache of the context service in between."""
    vlm = tiny_vlm(pad_id=PAD_ID)
    runner = ContextRunner(vlm, MANIFEST, prefix_cache_tokens=64, max_image_bytes=8192)
    pixels = images(3)
    texts = [TASK, "touch", TASK]
    batch = [PreparedObservation(tuple(tokenize(text, VOCABULARY, 8)), image.numpy())
             for text, image in zip(texts, pixels, strict=True)]
    results = runner.run(batch)
    assert [result.prefix_tokens_reused for result in results] == [0, 2, 8]
    for text, image, result in zip(texts, pixels, results, strict=True):
        with torch.no_grad():
            bare = vlm(ids_of([text], len(text.split()) + 2), image[None])[0]
        np.testing.assert_allclose(result.tokens, bare.numpy(), atol=1e-5)


def test_14_lengths_are_never_forgotten():
    """As above: a caller that does not say how long the texts are is stopped, not answered with padding in it."""
    masked, plain, pixels, ids = tiny_vlm(pad_id=PAD_ID), tiny_vlm(), images(1), ids_of([TASK], 8)
    with torch.no_grad():
        with pytest.raises(ValueError, match="needs the lengths"):
            masked.context(masked.encode_text(ids), pixels)
        with pytest.raises(ValueError, match="one without takes none"):
            plain.context(plain.encode_text(ids), pixels, torch.tensor([6]))


def test_14_the_shipped_model_is_always_padded_to_the_length_it_was_trained_with():
    """As above, for a backbone that learned its padding as a token: training and service have only one length."""
    manifest = load_manifest(ROOT / "models/tabletop")
    config = VlmConfig.from_dict(manifest.extra["vlm"])
    assert config.pad_id is None and config.text_length == manifest.instruction.num_tokens
    for text in ("touch the red block", "go"):
        assert len(tokenize(text, manifest.instruction.vocabulary, config.text_length)) == config.text_length
