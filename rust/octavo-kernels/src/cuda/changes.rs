//! Words on the device that are not what they were, or what they count on to: a few of them go up as one list, and
//! `cu/advance.cu` puts each in its place.

use super::device::{Device, Memory, bytes_of};
use super::driver::{Address, Driver};
use crate::Result;

/// Which words become what with the step that comes.
pub struct Changes {
    /// How many, then pairs of place and word. The device leaves it empty.
    memory: Memory,
    listed: Vec<u32>,
}

/// The most words that are listed in one step. What is more is uploaded where it belongs.
const MOST_LISTED: usize = 2048;
/// Places from here on are among what draws are told in lists, the others among the words of a step.
pub const OF_DRAWS: usize = 1 << 31;

impl Changes {
    /// Takes memory for a list, and leaves it empty.
    pub fn new(device: &Device) -> Result<Self> {
        let memory = device.take_array("a step's changes", 4, &[1 + 2 * MOST_LISTED])?;
        device.driver().fill(memory.at(), 0, memory.bytes())?;
        let mut listed = Vec::with_capacity(1 + 2 * MOST_LISTED);
        listed.push(0);
        Ok(Self { memory, listed })
    }

    /// Makes `held`, which lie from place `first` on, what is wanted, and lists what changes; unless that is more than
    /// `most`, or than there is room for.
    pub fn list(&mut self, held: &mut [u32], wanted: &[u32], first: usize, most: usize) -> bool {
        if held == wanted {
            return true; // as nearly always, and much faster than looking for a place
        }
        let before = self.listed.len();
        let room = most.min(MOST_LISTED - self.count());
        for (i, (held, &wanted)) in held.iter().zip(wanted).enumerate() {
            if *held != wanted {
                if self.listed.len() == before + 2 * room {
                    self.listed.truncate(before);
                    return false;
                }
                self.listed.extend([(first + i) as u32, wanted]);
            }
        }
        held.copy_from_slice(wanted);
        true
    }

    /// Uploads the list, if there is anything in it.
    pub fn send(&mut self, driver: &dyn Driver) -> Result<()> {
        if self.count() == 0 {
            return Ok(());
        }
        self.listed[0] = self.count() as u32;
        let sent = driver.upload(self.memory.at(), bytes_of(&self.listed));
        self.listed.truncate(1);
        sent
    }

    /// Where it is.
    pub fn at(&self) -> Address {
        self.memory.at()
    }

    fn count(&self) -> usize {
        (self.listed.len() - 1) / 2
    }
}
