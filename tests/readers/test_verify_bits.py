"""Any one bit of any header may rot: `verify` and `dump` say so, and name the batch."""

from pushrep.log.directory_files import segment_path
from pushrep.log.dump import DumpedBatch, OffsetWindow, dump_file
from pushrep.log.verify import verify_log
from tests.readers.small_logs import make_log


def test_o1_verify_names_the_batch_whose_header_rotted(tmp_path, torture):
    log = make_log(tmp_path / "logs")
    assert verify_log(log.path).is_whole
    for flip in log.flips(torture):
        batch = log.batches[flip.batch]
        with log.flipped(flip):
            found = verify_log(log.path)
            assert not found.is_whole, flip
            assert found.verified_to >= (log.batches[flip.batch - 1].next_offset if flip.batch else 0), flip
            # A leader epoch that rose may show only by the batch behind it, where no list of epochs is kept.
            assert found.verified_to <= batch.base_offset, flip


def test_o1_dump_shows_no_batch_at_a_wrong_offset(tmp_path, torture):
    log = make_log(tmp_path / "logs")
    true = {batch.base_offset: batch.next_offset for batch in log.batches}
    for flip in log.flips(torture):
        with log.flipped(flip):
            for base in log.bases:
                for shown in dump_file(segment_path(log.path, base), OffsetWindow()):
                    if isinstance(shown, DumpedBatch):
                        header = shown.batch.header
                        assert true.get(header.base_offset) == header.next_offset, flip
