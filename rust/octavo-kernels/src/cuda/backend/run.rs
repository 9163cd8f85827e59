//! A step: launched, or repeated as it was recorded.

use super::CudaBackend;
use crate::cuda::device::columns;
use crate::cuda::graphs::{Graphs, How, Kind};
use crate::draw::RowDraw;
use crate::{StepInput, StepLimits};

/// The most draws of a step: one for each sequence, and some that belong to nobody.
pub(super) fn most_draws(limits: &StepLimits) -> usize {
    Graphs::padded(limits.segments, limits.rows)
}

/// Blocks for rows that run ahead: one for each that begins a block in such a step, in every group. Few do at a time, and
/// when they all do, nothing is run ahead.
pub(super) fn most_spares(limits: &StepLimits) -> usize {
    limits.groups * limits.segments.min(16)
}

impl CudaBackend {
    /// Steps in which every sequence has one row are recorded, with so many rows that few sizes are.
    pub(super) fn run_step(
        &mut self,
        input: &StepInput<'_>,
        draws: &[RowDraw<'_>],
        operations: impl FnOnce(&mut Self, usize),
    ) {
        let decodes = input.segments.iter().all(|segment| segment.rows == 1);
        self.step.begin(input);
        let rows = match self.null_slot.filter(|_| decodes) {
            Some(null_slot) => {
                let rows = Graphs::padded(self.step.rows(), self.limits.rows);
                self.step.pad(rows, null_slot);
                rows
            }
            None => self.step.rows(),
        };
        let words = match &mut self.draws {
            Some(all) if !draws.is_empty() => all.begin(&self.device, Some(&mut self.changes), draws, rows),
            _ => &[],
        };
        self.on_device.begin(&self.device, &mut self.changes, &self.step, words);
        let launch = |this: &mut Self| {
            this.advance();
            this.rope_angles();
            operations(this, rows);
        };
        if !decodes || self.null_slot.is_none() {
            return launch(self);
        }
        let device = self.device.clone();
        let kind = Kind { rows, draws: !draws.is_empty() };
        match self.graphs.how(kind) {
            How::Launch => launch(self),
            How::Record => {
                if let Some(graph) = device.record(|| launch(self)) {
                    self.graphs.keep(kind, graph);
                    device.attempt(|driver| driver.replay(graph));
                }
            }
            How::Replay(graph) => device.attempt(|driver| driver.replay(graph)),
        }
    }

    /// What has begun becomes the step that runs.
    pub(super) fn advance(&self) {
        self.on_device.advance(&self.device, &self.changes, self.draws.as_ref());
    }

    /// The angles of all rotary embeddings for the step's rows.
    pub(super) fn rope_angles(&self) {
        for rope in &self.ropes {
            let (threads, blocks) = columns(rope.pairs);
            self.device
                .launch("rope_angles", [self.step.rows(), blocks], threads)
                .pointer(rope.angles.at())
                .pointer(self.on_device.positions())
                .pointer(rope.inv_freq.at())
                .int(rope.pairs)
                .float(rope.scale)
                .go();
        }
    }
}
