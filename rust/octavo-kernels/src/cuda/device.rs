//! A device as the backend's files use it: memory that gives itself back, and launches that read like calls.

use std::sync::{Arc, Mutex, PoisonError};

use super::driver::{Address, Argument, ArgumentKind, Driver, GraphId, HostId, Launch};
use super::nvidia::Nvidia;
use crate::{BackendError, Result};

/// A device, shared by everything that lies on it. An operation that fails leaves its error here: operations return
/// nothing, and what follows a failed one would make no sense.
#[derive(Clone)]
pub struct Device {
    driver: Arc<dyn Driver>,
    failure: Arc<Mutex<Option<BackendError>>>,
}

impl Device {
    fn new(driver: impl Driver + 'static) -> Self {
        Self { driver: Arc::new(driver), failure: Arc::default() }
    }

    /// The same one, for somebody whom its failures so far do not concern.
    pub fn afresh(&self) -> Self {
        Self { driver: self.driver.clone(), failure: Arc::default() }
    }

    /// GPU number `ordinal`.
    pub fn gpu(ordinal: usize) -> Result<Self> {
        Ok(Self::new(Nvidia::open(ordinal)?))
    }

    /// The CPU, pretending to be one; in builds with the feature `cuda-shim`.
    pub fn shim() -> Result<Self> {
        #[cfg(feature = "cuda-shim")]
        return Ok(Self::new(super::shim::Shim::default()));
        #[cfg(not(feature = "cuda-shim"))]
        Err(BackendError::Unsupported("this build of octavo has no cuda-shim, which is for tests".to_owned()))
    }

    /// The same with so much memory.
    #[cfg(feature = "cuda-shim")]
    pub fn shim_of(memory_bytes: u64) -> Self {
        Self::new(super::shim::Shim::new(memory_bytes))
    }

    /// One that does nothing, and counts what it is told.
    pub fn null() -> (Self, Arc<super::null::Null>) {
        let null = Arc::new(super::null::Null::new());
        (Self { driver: null.clone(), failure: Arc::default() }, null)
    }

    /// The driver, for what has no better name here.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Takes memory for `what`.
    pub fn take(&self, what: &'static str, bytes: usize) -> Result<Memory> {
        let at = self.driver.take(what, bytes.max(1))?;
        Ok(Memory { device: self.clone(), at, bytes })
    }

    /// Takes memory for `lens[0] · lens[1] · …` elements of `element` bytes.
    pub fn take_array(&self, what: &'static str, element: usize, lens: &[usize]) -> Result<Memory> {
        let bytes = lens.iter().try_fold(element, |bytes, &len| bytes.checked_mul(len));
        self.take(what, bytes.ok_or(BackendError::OutOfMemory { what, bytes: usize::MAX })?)
    }

    /// Takes memory of the host that is copied to in the background.
    pub fn take_host(&self, what: &'static str, bytes: usize) -> Result<HostMemory> {
        Ok(HostMemory { device: self.clone(), id: self.driver.take_host(what, bytes)? })
    }

    /// Takes memory that holds `values`.
    pub fn take_with(&self, what: &'static str, values: &[u8]) -> Result<Memory> {
        let memory = self.take(what, values.len())?;
        self.driver.upload(memory.at, values)?;
        Ok(memory)
    }

    /// A launch of `kernel`: `blocks` of `threads`.
    pub fn launch<const N: usize>(
        &self,
        kernel: impl Into<String>,
        blocks: [usize; N],
        threads: usize,
    ) -> LaunchOf<'_> {
        let mut grid = [1; 3];
        for (grid, blocks) in grid.iter_mut().zip(blocks) {
            *grid = u32::try_from(blocks).expect("a grid within its limits");
        }
        let (kernel, arguments) = (kernel.into(), Vec::with_capacity(16));
        LaunchOf { device: self, launch: Launch { kernel, grid, threads: threads as u32, shared_bytes: 0, arguments } }
    }

    /// Does something unless something has failed before; keeps the error.
    pub fn attempt(&self, act: impl FnOnce(&dyn Driver) -> Result<()>) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.is_none() {
            *failure = act(&*self.driver).err();
        }
    }

    /// A graph of what `act` launches. `None`: something has failed.
    pub fn record(&self, act: impl FnOnce()) -> Option<GraphId> {
        self.attempt(|driver| driver.begin_recording());
        if self.failure().is_some() {
            return None;
        }
        act();
        // Recording ends whatever has failed in between.
        let recorded = self.driver.end_recording();
        let mut graph = None;
        self.attempt(|_| recorded.map(|recorded| graph = Some(recorded)));
        graph
    }

    /// What has failed, if anything.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(ToString::to_string)
    }
}

/// Bytes on a device, until dropped.
pub struct Memory {
    device: Device,
    at: Address,
    bytes: usize,
}

impl Memory {
    /// Where it begins.
    pub fn at(&self) -> Address {
        self.at
    }
    /// How much there is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
    /// The place `bytes` further on.
    pub fn offset(&self, bytes: usize) -> Address {
        assert!(bytes <= self.bytes, "byte {bytes} of {}", self.bytes);
        self.at + bytes as Address
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.device.driver.give_back(self.at);
    }
}

/// Memory of the host that a device copies to, until dropped.
pub struct HostMemory {
    device: Device,
    id: HostId,
}

impl HostMemory {
    /// Copies to it, from its byte `first` on, once everything before has run.
    pub fn download_later(&self, first: usize, from: Address, bytes: usize) {
        self.device.attempt(|driver| driver.download_later(self.id, first, from, bytes));
    }
    /// What it holds, once all that has been copied. After a failure `to` is left as it is.
    pub fn read(&self, to: &mut [u8]) {
        self.device.attempt(|driver| driver.read_host(to, self.id));
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        self.device.driver.give_back_host(self.id);
    }
}

/// A launch that is being put together. Arguments come in the order of the kernel's parameters.
#[must_use = "a launch runs with `go`"]
pub struct LaunchOf<'a> {
    device: &'a Device,
    launch: Launch,
}

impl LaunchOf<'_> {
    /// Dynamic shared memory of a block.
    pub fn shared(mut self, bytes: usize) -> Self {
        self.launch.shared_bytes = bytes as u32;
        self
    }

    /// The next argument is an address, see [`Memory::at`].
    pub fn pointer(self, at: Address) -> Self {
        self.argument(at, ArgumentKind::Pointer)
    }

    /// The next argument is an address, or null.
    pub fn pointer_if(self, at: Option<Address>) -> Self {
        self.pointer(at.unwrap_or(0))
    }

    /// The next argument is an integer of 32 bits.
    pub fn int(self, value: usize) -> Self {
        let value = u32::try_from(value).expect("a size within 32 bits");
        self.argument(value.into(), ArgumentKind::Integer)
    }

    /// The next argument is an f32.
    pub fn float(self, value: f32) -> Self {
        self.argument(value.to_bits().into(), ArgumentKind::Float)
    }

    fn argument(mut self, bits: u64, kind: ArgumentKind) -> Self {
        self.launch.arguments.push(Argument { bits, kind });
        self
    }

    /// Runs it, after everything before. A launch of no blocks is none.
    pub fn go(self) {
        if !self.launch.grid.contains(&0) {
            self.device.attempt(|driver| driver.launch(&self.launch));
        }
    }
}

/// Threads of a block that goes through a row of `width` values: four each, in whole warps.
pub fn row_threads(width: usize) -> usize {
    width.div_ceil(4).next_multiple_of(32).clamp(32, 256)
}

/// Threads of a block, and blocks, of a launch with a thread for each of `width` values.
pub fn columns(width: usize) -> (usize, usize) {
    let threads = width.next_multiple_of(32).clamp(32, 256);
    (threads, width.div_ceil(threads))
}

/// Numbers that are nothing but their bytes.
pub trait Number: Copy {}
impl Number for f32 {}
impl Number for u32 {}

/// Numbers as bytes.
pub fn bytes_of<T: Number>(numbers: &[T]) -> &[u8] {
    // SAFETY: numbers without padding, and as many bytes as they have.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// Numbers as bytes, to write.
pub fn bytes_of_mut<T: Number>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and any bytes are such a number.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}
