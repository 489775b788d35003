"""Place orders, some of which are rolled back; each with its event."""

from contextlib import suppress

from django.core.management.base import BaseCommand
from django.db import transaction

from pushrep.django import emit
from pushrep.tables import NotInTransaction
from shop.models import Order, OrderPlaced, orders


class RolledBack(Exception):
    pass


class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("numbers", type=int, nargs="+")

    def handle(self, numbers, **_):
        with suppress(NotInTransaction):
            emit(orders, OrderPlaced(0, "nobody"))
            raise AssertionError("outside of a transaction")
        for number in numbers:
            with suppress(RolledBack), transaction.atomic():
                self.place(number)
                with suppress(RolledBack), transaction.atomic():  # a savepoint
                    self.place(1000 + number)
                    raise RolledBack
                if number % 5 == 4:
                    raise RolledBack

    def place(self, number):
        Order.objects.create(number=number, customer=f"c{number % 3}")
        emit(orders, OrderPlaced(number, f"c{number % 3}"))
