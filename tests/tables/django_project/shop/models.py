"""An order, and the event that tells of it."""

from dataclasses import dataclass

from django.db import models

from pushrep.django import outbox


class Order(models.Model):
    number = models.IntegerField()
    customer = models.TextField()


@dataclass
class OrderPlaced:
    order: int
    customer: str


orders = outbox.topic("orders", OrderPlaced, partitions=2, key=lambda event: event.customer)
