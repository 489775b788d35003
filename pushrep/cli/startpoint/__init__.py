"""`pushrep startpoint`: where consumers start next. pushrep.startpoints does the work; here it is asked and shown.

set, cancel                   write, with a reason that is kept
repair                        the same, with a look at the table whose rows are replaced
list, show, history           look; no lock is taken
export, apply-checkpoint      as Spark's startingOffsets; into the checkpoint of a stopped query
"""

import click

from pushrep.cli.startpoint.applying import apply_checkpoint
from pushrep.cli.startpoint.exporting import export
from pushrep.cli.startpoint.looking import history, list_, show
from pushrep.cli.startpoint.repairing import repair
from pushrep.cli.startpoint.setting import cancel, set_


@click.group()
def startpoint() -> None:
    """Say where a consumer's partition starts next: applied once, by whoever runs or starts next, and kept as history.

    \b
      pushrep startpoint set out orders --consumer billing --to 2013-07-04T14:00 --reason "wrote nonsense" --dry-run
      pushrep startpoint repair out orders --consumer billing --from 2013-07-04T14:00 --sink ./orders-table --dry-run
      pushrep startpoint list out            what waits, runs or stops somebody
      pushrep startpoint cancel out 3 --reason "wrong day"
      pushrep startpoint history out         who asked for what, and what became of it

    A Spark query that follows no startpoints is moved while it is stopped: pushrep startpoint apply-checkpoint --help

    DIRECTORY is that of the logs; startpoints lie in DIRECTORY/startpoints, or where --store says.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are


for command in (set_, repair, list_, show, cancel, history, export, apply_checkpoint):
    startpoint.add_command(command)
