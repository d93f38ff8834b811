"""The controller: it watches, decides by a pure policy, and brings training back in three phases."""
