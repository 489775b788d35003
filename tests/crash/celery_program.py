"""A celery application whose prefork workers open a slot each; each worker writes what was acknowledged into a file.

One task in 40 kills its worker by SIGKILL while it runs. At other times no worker is killed: a worker that dies while
it holds the lock of the pool's queue stops the whole pool, which is a fault of celery.
"""

import os
import random
import signal
import threading
import time
from pathlib import Path

from celery import Celery
from celery.signals import worker_process_init

from pushrep import Outbox

ROOT = Path(os.environ["CELERY_ROOT"])
FOLDERS = {"data_folder_in": str(ROOT / "queue"), "data_folder_out": str(ROOT / "queue")}
app = Celery("orders", broker="filesystem://", broker_transport_options=FOLDERS | {"control_folder": str(ROOT / "c")})
app.conf.update(task_ignore_result=True, worker_send_task_events=False, broker_connection_retry_on_startup=True)

outbox = None


@worker_process_init.connect
def take_slot(**_):
    global outbox  # noqa: PLW0603 - one a worker process, opened behind the fork
    outbox = Outbox.open_slot(ROOT / "outbox", "orders", 1, "celery", slots=16)


@app.task
def order(number):
    if random.random() < 1 / 40:
        threading.Timer(random.uniform(0, 0.008), os.kill, (os.getpid(), signal.SIGKILL)).start()
    offset = outbox.append(0, b"%d" % number).result(60)
    with (ROOT / f"kept-{os.getpid()}").open("a") as kept:
        kept.write(f"{outbox.directory.name} {offset} {number}\n")
    time.sleep(0.01)  # a kill comes while the task is under way
