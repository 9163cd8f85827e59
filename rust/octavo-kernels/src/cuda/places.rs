//! Where each sequence's block tables lie on the device: in one place for as long as it is in every step, whoever else comes
//! and goes, so that what is there need not be uploaded again. A backend does not know sequences by name; a table tells.

/// As many places as there can be sequences in a step, of equally many entries.
pub struct Places {
    /// Entries of a place.
    stride: usize,
    taken: Vec<bool>,
    /// Of each segment of the step at hand, and of the one before: the first entry of its place.
    of_segments: Vec<usize>,
    before: Vec<usize>,
}

/// Of a segment whose place has yet to be found.
const NOWHERE: usize = usize::MAX;

impl Places {
    /// Places for so many sequences, of `stride` entries each.
    pub fn new(count: usize, stride: usize) -> Self {
        let [of_segments, before] = [0; 2].map(|_| Vec::with_capacity(count));
        Self { stride, taken: vec![false; count], of_segments, before }
    }

    /// Entries of all places together.
    pub fn entries(&self) -> usize {
        self.taken.len() * self.stride
    }

    /// The first entry of each segment's place.
    pub fn of_segments(&self) -> &[usize] {
        &self.of_segments
    }

    /// Finds a place for each of `count` segments, given their tables and those that the places hold. It need not be the best.
    pub fn assign<'a>(&mut self, count: usize, held: &[u32], table: impl Fn(usize) -> &'a [u32]) {
        std::mem::swap(&mut self.of_segments, &mut self.before);
        self.of_segments.clear();
        self.taken.fill(false);
        // Those that go on keep their order.
        let mut next = 0;
        for number in 0..count {
            let table = table(number);
            assert!(
                table.len() <= self.stride,
                "a block table of {} entries: there is room for {}",
                table.len(),
                self.stride
            );
            let place = self.find(next, held, table);
            if place != NOWHERE {
                self.taken[place / self.stride] = true;
                next = self.before[next..].iter().position(|&before| before == place).map_or(next, |at| next + at + 1);
            }
            self.of_segments.push(place);
        }
        let mut free =
            self.taken.iter().enumerate().filter(|(_, taken)| !**taken).map(|(number, _)| number * self.stride);
        for place in self.of_segments.iter_mut().filter(|place| **place == NOWHERE) {
            *place = free.next().expect("as many places as segments");
        }
    }

    /// A free place whose sequence goes on with `table`: most likely that of segment number `next` of the step before.
    fn find(&self, next: usize, held: &[u32], table: &[u32]) -> usize {
        let fits = |&place: &usize| !self.taken[place / self.stride] && goes_on(&held[place..][..self.stride], table);
        let all = (0..self.taken.len()).map(|number| number * self.stride);
        self.before[next..].first().copied().filter(fits).or_else(|| all.into_iter().find(fits)).unwrap_or(NOWHERE)
    }
}

/// Whether `table` seems to be what `held` was a step ago: the block that is written to is nobody else's, and where that has
/// just begun, the one before is still known.
fn goes_on(held: &[u32], table: &[u32]) -> bool {
    let same =
        |from_end: usize| table.len() >= from_end && held[table.len() - from_end] == table[table.len() - from_end];
    same(1) || same(2)
}
