//! A step's input on the device. Everything has a place that is the same in all steps of so many rows. From one step to the
//! next the device itself counts on (`cu/advance.cu`), and only what is different from that is uploaded.

use std::ops::Range;

use super::changes::Changes;
use super::device::{Device, Memory, bytes_of};
use super::draws::{DRAW_WORDS, Draws};
use super::driver::{Address, Driver};
use super::places::Places;
use crate::{KV_SPLIT, Result, StepLimits, step::Step};

/// Ids, positions, slots and block tables of the step that runs, as u32, and how tokens are drawn after it.
pub struct StepOnDevice {
    /// The words of a step as [`Layout`] says, and behind the most that there can be the block tables, `(groups, entries)`:
    /// those of every place, one after another, and one of rows that belong to nobody.
    state: Memory,
    /// Token ids, a row each: where those that are drawn have become known.
    ids: Memory,
    /// Rows to be gathered.
    gathered: Memory,
    limits: StepLimits,
    /// Of the step that runs.
    layout: Layout,
    /// What `state` holds while that runs.
    held: Vec<u32>,
    places: Places,
    /// Where in `state` the block tables begin.
    tables_at: usize,
    /// Scratch: the words of a step.
    wanted: Vec<u32>,
    /// What `gathered` holds.
    host_gathered: Vec<u32>,
}

/// How the words of a step lie: how many rows are somebody's; then, for every row, its id, where its block table begins
/// within its group's part, its position, and its slot in every group; then how tokens are drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Layout {
    own: usize,
    rows: usize,
    groups: usize,
    draw_words: usize,
}

/// Arrays of rows beside the slots.
const BESIDE_SLOTS: usize = 3;
/// The most words of one block table that are listed: when a sequence begins, it is uploaded in one piece.
const MOST_LISTED_OF_TABLE: usize = 8;
/// Block tables begin at multiples of this: where a split of attention does, whatever the size of a block.
const TABLE_ALIGNMENT: usize = KV_SPLIT / 16;

impl Layout {
    fn words(&self) -> usize {
        self.draws_at() + self.draw_words
    }
    fn draws_at(&self) -> usize {
        self.array(BESIDE_SLOTS + self.groups)
    }
    fn array(&self, number: usize) -> usize {
        1 + number * self.rows
    }
    /// Does something to every word that is one more in the next step: positions and slots of rows that are somebody's.
    fn count(&self, words: &mut [u32], count: fn(u32) -> u32) {
        for array in words[self.array(2)..self.draws_at()].chunks_exact_mut(self.rows) {
            array[..self.own].iter_mut().for_each(|word| *word = count(*word));
        }
    }
}

impl StepOnDevice {
    /// Takes the memory for steps within `limits`, with up to `draws` draws.
    pub fn new(device: &Device, limits: StepLimits, draws: usize) -> Result<Self> {
        let array = |lens: &[usize]| device.take_array("a step's input", 4, lens);
        let most = Layout { own: 0, rows: limits.rows, groups: limits.groups, draw_words: draws * DRAW_WORDS };
        let places = Places::new(limits.segments, limits.table_entries.next_multiple_of(TABLE_ALIGNMENT));
        let words = most.words() + limits.groups * (places.entries() + 1);
        let state = array(&[words])?;
        device.driver().fill(state.at(), 0xff, state.bytes())?;
        Ok(Self {
            state,
            ids: array(&[limits.rows])?,
            gathered: array(&[limits.rows])?,
            limits,
            layout: Layout::default(),
            held: vec![u32::MAX; words],
            places,
            tables_at: most.words(),
            wanted: Vec::with_capacity(most.words()),
            host_gathered: Vec::with_capacity(limits.rows),
        })
    }

    /// Rows that belong to nobody read this block.
    pub fn set_null_block(&mut self, driver: &dyn Driver, block: u32) -> Result<()> {
        (0..self.limits.groups).try_for_each(|group| {
            let place = self.table_at(group, self.places.entries());
            self.held[place] = block;
            driver.upload(self.state.offset(4 * place), bytes_of(&[block]))
        })
    }

    /// Uploads what [`Self::advance`] cannot know of `step`, and of how tokens are drawn after it, with what is among the
    /// changes already. Rows after those of its segments belong to nobody.
    pub fn begin(&mut self, device: &Device, changes: &mut Changes, step: &Step, draws: &[u32]) {
        let layout = Layout {
            own: step.segments.iter().map(|segment| segment.rows).sum(),
            rows: step.rows(),
            groups: step.slots.len() / step.rows(),
            draw_words: draws.len(),
        };
        self.places.assign(step.segments.len(), &self.held[self.tables_at..], |number| step.table(number, 0));
        device.attempt(|driver| {
            self.begin_rows(driver, changes, layout, step, draws)?;
            (0..layout.groups).try_for_each(|group| self.begin_tables(driver, changes, group, step))?;
            changes.send(driver)
        });
    }

    /// The words of the step's rows: those of the step before, counted on, but for a few; or all of them.
    fn begin_rows(
        &mut self,
        driver: &dyn Driver,
        changes: &mut Changes,
        layout: Layout,
        step: &Step,
        draws: &[u32],
    ) -> Result<()> {
        self.wanted.clear();
        self.wanted.push(layout.own as u32);
        self.wanted.extend(&step.ids);
        for (segment, &place) in step.segments.iter().zip(self.places.of_segments()) {
            self.wanted.resize(self.wanted.len() + segment.rows, place as u32);
        }
        self.wanted.resize(layout.array(2), self.places.entries() as u32);
        self.wanted.extend(step.positions.iter().chain(&step.slots).chain(draws));
        let held = &mut self.held[..layout.words()];
        if layout == self.layout {
            layout.count(held, |word| word.wrapping_add(1));
            // A word in the list is twice as long.
            if changes.list(held, &self.wanted, 0, layout.words() / 2) {
                return Ok(());
            }
        }
        self.layout = layout;
        held.copy_from_slice(&self.wanted);
        // They will be counted on.
        layout.count(&mut self.wanted, |word| word.wrapping_sub(1));
        driver.upload(self.state.at(), bytes_of(&self.wanted))
    }

    /// The step's block tables in a group.
    fn begin_tables(&mut self, driver: &dyn Driver, changes: &mut Changes, group: usize, step: &Step) -> Result<()> {
        for number in 0..step.segments.len() {
            let (table, at) = (step.table(number, group), self.table_at(group, self.places.of_segments()[number]));
            let held = &mut self.held[at..][..table.len()];
            if !changes.list(held, table, at, MOST_LISTED_OF_TABLE)
                && let Some(changed) = refill(held, table)
            {
                driver.upload(self.state.offset(4 * (at + changed.start)), bytes_of(&table[changed]))?;
            }
        }
        Ok(())
    }

    /// Makes the step that has begun of the one before.
    pub fn advance(&self, device: &Device, changes: &Changes, draws: Option<&Draws>) {
        let Layout { rows, groups, .. } = self.layout;
        device
            .launch("advance", [1], ((1 + groups) * rows).next_multiple_of(32).clamp(256, 1024))
            .pointer(self.ids.at())
            .pointer(self.state.at())
            .pointer_if(draws.map(Draws::lists))
            .pointer(changes.at())
            .pointer_if(draws.map(Draws::drawn))
            .int(rows)
            .int(groups)
            .go();
    }

    /// Uploads how tokens are drawn from rows of the step that runs, which has begun without draws.
    pub fn set_draws(&mut self, device: &Device, draws: &[u32]) {
        assert_eq!(self.layout.draw_words, 0, "draws of a step that has some");
        device.attempt(|driver| driver.upload(self.draws(), bytes_of(draws)));
    }

    /// Uploads the numbers of rows to be gathered; where they lie.
    pub fn gather(&mut self, device: &Device, rows: &[u32]) -> Address {
        assert!(rows.len() <= self.limits.rows, "{} rows are gathered of {}", rows.len(), self.limits.rows);
        if self.host_gathered != rows {
            self.host_gathered.clear();
            self.host_gathered.extend(rows);
            device.attempt(|driver| driver.upload(self.gathered.at(), bytes_of(rows)));
        }
        self.gathered.at()
    }

    /// Token ids, a row each.
    pub fn ids(&self) -> Address {
        self.ids.at()
    }
    /// Positions, a row each.
    pub fn positions(&self) -> Address {
        self.array(2)
    }
    /// Where block tables begin, a row each.
    pub fn row_tables(&self) -> Address {
        self.array(1)
    }
    /// Slots of a group, a row each.
    pub fn slots(&self, group: usize) -> Address {
        self.array(BESIDE_SLOTS + group)
    }
    /// Block tables of a group.
    pub fn tables(&self, group: usize) -> Address {
        self.state.offset(4 * self.table_at(group, 0))
    }
    /// Entries of all block tables of a group, together.
    pub fn table_entries(&self) -> usize {
        self.places.entries()
    }

    /// How tokens are drawn.
    pub fn draws(&self) -> Address {
        self.state.offset(4 * self.layout.draws_at())
    }

    fn array(&self, number: usize) -> Address {
        self.state.offset(4 * self.layout.array(number))
    }

    /// Where in `state` an entry of a group's block tables lies.
    fn table_at(&self, group: usize, entry: usize) -> usize {
        self.tables_at + group * (self.places.entries() + 1) + entry
    }
}

/// Makes `held` what is wanted; from the first that changes to the last, if any does.
pub fn refill(held: &mut [u32], wanted: &[u32]) -> Option<Range<usize>> {
    if held == wanted {
        return None;
    }
    let differs = |(held, wanted): (&u32, &u32)| held != wanted;
    let first = held.iter().zip(wanted).position(differs)?;
    let last = held.iter().zip(wanted).rposition(differs)?;
    held[first..=last].copy_from_slice(&wanted[first..=last]);
    Some(first..last + 1)
}

#[cfg(all(test, feature = "cuda-shim"))]
mod tests;
