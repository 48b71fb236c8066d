"""A real MQTT broker that records what it receives: `python -m tests.deployment.mqtt_broker PORT FILE`."""

import asyncio
import os
import sys
from typing import Any

from amqtt.broker import Broker
from amqtt.plugins.base import BasePlugin


class Recorder(BasePlugin):  # type: ignore[misc]  # amqtt is not typed
    """Appends each message to the given file."""

    async def on_broker_message_received(self, *, client_id: str, message: Any) -> None:
        with open(sys.argv[2], "ab") as file:
            file.write(message.topic.encode() + b" " + bytes(message.data) + b"\n")


async def serve(port: int) -> None:
    broker = Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{port}"}},
            "plugins": {
                "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True},
                "tests.deployment.mqtt_broker.Recorder": {},
            },
        }
    )
    await broker.start()
    os.write(1, b"up\n")
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
