//! Decode steps, recorded: the launches of a step of so many rows are the same in every such step, on the same places.

use std::collections::BTreeMap;

use super::device::Device;
use super::driver::GraphId;

/// Recorded steps.
pub struct Graphs {
    device: Device,
    /// `None`: has been run once.
    recorded: BTreeMap<Kind, Option<GraphId>>,
}

/// What makes steps the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind {
    /// Rows, with those that belong to nobody.
    pub rows: usize,
    /// Whether they end with tokens.
    pub draws: bool,
}

/// How a step is run.
pub enum How {
    /// Launch by launch. For the first of its size: the driver loads a kernel when it is launched first, which must not
    /// happen while a graph is recorded; and a size that comes only once is not worth recording.
    Launch,
    /// Launch by launch into a graph, and then as that graph.
    Record,
    /// As it was recorded.
    Replay(GraphId),
}

impl Graphs {
    /// None.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), recorded: BTreeMap::new() }
    }

    /// How many rows a step of `rows` is run with, of at most `most`: few sizes are recorded, and none wastes much.
    pub fn padded(rows: usize, most: usize) -> usize {
        let padded = if rows < 8 { rows.next_power_of_two() } else { rows.next_multiple_of(8) };
        padded.min(most)
    }

    /// How a step is run now.
    pub fn how(&mut self, kind: Kind) -> How {
        match self.recorded.get(&kind) {
            None => {
                self.recorded.insert(kind, None);
                How::Launch
            }
            Some(None) => How::Record,
            Some(&Some(graph)) => How::Replay(graph),
        }
    }

    /// Keeps what was recorded.
    pub fn keep(&mut self, kind: Kind, graph: GraphId) {
        self.recorded.insert(kind, Some(graph));
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.recorded.values().flatten().count()
    }
}

impl Drop for Graphs {
    fn drop(&mut self) {
        self.recorded.values().flatten().for_each(|&graph| self.device.driver().drop_graph(graph));
    }
}
