"""`pushrep log`: the tools around the files of a log. The work is done in pushrep.log; here it is asked for and shown.

ls, describe, dump, verify            read only, beside a running writer
repair, restore, truncate, rebuild-index, mark-cleaned, new-epoch     take the writer's lock; refused, with its pid,
                                      while one runs
purge                                 asked of the open outbox; takes the lock where nobody has it
"""

import click

from pushrep.cli.log.changing import mark_cleaned, new_epoch, purge, rebuild_index, repair, restore, truncate
from pushrep.cli.log.dumping import dump
from pushrep.cli.log.looking import describe, ls
from pushrep.cli.log.verifying import verify


@click.group()
def log() -> None:
    """Look into the files of logs, check and mend them.

    \b
      pushrep log ls DIRECTORY               every log in it: offsets, size, who writes, closed clean or not
      pushrep log describe LOG               its segments, indexes, epochs, checkpoints, and what lies aside
      pushrep log dump LOG --records         batch by batch, in the words of Kafka's DumpLogSegments
      pushrep log verify DIRECTORY           is every byte what it was?
      pushrep log repair LOG --from-copy D   a damaged range from another copy, if it joins
      pushrep log restore LOG FILE           what was set aside, back where it fits
      pushrep log purge DIRECTORY --before T whole old segments that nobody needs

    LOG is the directory of one partition, DIRECTORY the one that holds it. Exit code 1 says: damage was found.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are


for command in (ls, describe, dump, verify, repair, restore, truncate, rebuild_index, mark_cleaned, new_epoch, purge):
    log.add_command(command)
