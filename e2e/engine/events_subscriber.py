"""Who hears vLLM's KV events: binds a port on loopback and prints it, then an event a line.

Run by the interpreter of vLLM's environment, which has ZeroMQ; a line is JSON, hashes are hex. It listens
before the engine starts, and vLLM connects to an endpoint without `*`: nothing is missed.
"""

import json

import msgspec
import zmq


def main() -> None:
    """Print until the process is ended."""
    subscriber = zmq.Context().socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    print(subscriber.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    while True:
        _, _, batch = subscriber.recv_multipart()  # topic, number of the batch, what it holds
        _, events, *_ = msgspec.msgpack.decode(batch)  # time, events, rank
        for event in events:
            print(json.dumps(event, default=bytes.hex), flush=True)


if __name__ == "__main__":
    main()
