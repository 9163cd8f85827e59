//! The driver of a real GPU. Its library is opened at run time, so nothing here needs it to be there before a device is
//! asked for. The one file with calls of it.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::driver::{Address, DeviceInfo, Driver, GraphId, HostId, Launch};
use super::image;
use crate::{BackendError, Result};

/// The library that was looked for.
const LIBRARY: &str = "libcuda.so.1";

/// A GPU, its primary context, and one stream.
pub struct Nvidia {
    info: DeviceInfo,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    modules: Vec<sys::CUmodule>,
    state: Mutex<State>,
    staging: Mutex<Option<Staging>>,
}

/// Pinned memory that everything goes through on its way to the device, in two halves: one is filled while the other is
/// copied. So a large upload is a pipeline, and a small one costs no wait.
struct Staging {
    at: *mut u8,
    /// What the half holds has been copied.
    copied: [sys::CUevent; 2],
    half: usize,
    used: usize,
}

/// Bytes of a half.
const HALF_BYTES: usize = 4 << 20;

#[derive(Default)]
struct State {
    functions: HashMap<String, Function>,
    graphs: HashMap<GraphId, Graph>,
    hosts: HashMap<HostId, HostMemory>,
    /// The next graph or memory of the host.
    next_id: u64,
}

#[derive(Clone, Copy)]
struct Function(sys::CUfunction);

#[derive(Clone, Copy)]
struct Graph(sys::CUgraphExec);

/// Pinned memory, and the event of the last copy to it.
#[derive(Clone, Copy)]
struct HostMemory {
    at: *mut u8,
    bytes: usize,
    copied: sys::CUevent,
}

// SAFETY: plain memory and a handle of the driver, which may be used from any thread.
unsafe impl Send for HostMemory {}

// SAFETY: handles of the driver, which may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Graph {}
// SAFETY: handles of the driver, which may be used from any thread; every call makes the context the thread's own first.
unsafe impl Send for Nvidia {}
// SAFETY: as above; what changes lies behind the mutex.
unsafe impl Sync for Nvidia {}

fn failed(what: &str) -> impl Fn(DriverError) -> BackendError + '_ {
    move |error| BackendError::Device(format!("{what}: {}", words(error)))
}

/// The driver's own name of an error, and what it says about it.
fn words(error: DriverError) -> String {
    let text = |found: Result<&CStr, DriverError>| found.map_or("?".into(), |text| text.to_string_lossy().into_owned());
    format!("{} ({})", text(error.error_name()), text(error.error_string()))
}

/// Opens the driver's library and starts it. An error says what was looked for and where.
fn start() -> Result<()> {
    // SAFETY: opening the driver's library runs its initialisers, which is what it is for.
    if !unsafe { sys::is_culib_present() } {
        let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        return Err(BackendError::Unsupported(format!(
            "there is no CUDA driver for a device: the dynamic linker finds no {LIBRARY} (nor libcuda.so) in \
             LD_LIBRARY_PATH ({path:?}), its cache or the system's folders; it comes with NVIDIA's driver, not with a toolkit"
        )));
    }
    result::init().map_err(failed("the CUDA driver does not start"))
}

/// What every device of this machine is; an error if there is no driver.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    start()?;
    let count = result::device::get_count().map_err(failed("counting devices"))?;
    (0..count).map(|ordinal| Ok(describe(ordinal)?.1)).collect()
}

fn describe(ordinal: c_int) -> Result<(sys::CUdevice, DeviceInfo)> {
    use sys::CUdevice_attribute_enum as Attribute;
    let asked = failed("asking what a device is");
    let device = result::device::get(ordinal).map_err(&asked)?;
    // SAFETY: the device was given by the driver on the line above.
    let attribute = |which| unsafe { result::device::get_attribute(device, which) }.map_err(&asked);
    let info = DeviceInfo {
        name: result::device::get_name(device).map_err(&asked)?,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        ),
        processors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        // SAFETY: the device was given by the driver.
        memory_bytes: unsafe { result::device::total_mem(device) }.map_err(&asked)? as u64,
    };
    Ok((device, info))
}

impl Nvidia {
    /// Opens device number `ordinal`.
    pub fn open(ordinal: usize) -> Result<Self> {
        if image::IMAGES.is_empty() {
            return Err(BackendError::Unsupported(
                "this build of octavo has no kernels for a CUDA device: it was built without nvcc ($NVCC, \
                 $CUDA_HOME/bin/nvcc or nvcc on the path)"
                    .to_owned(),
            ));
        }
        let all = devices()?;
        if ordinal >= all.len() {
            let names: Vec<_> = all.iter().map(|info| info.name.as_str()).collect();
            return Err(BackendError::Device(format!(
                "there is no device cuda:{ordinal}: the driver knows {} ({})",
                all.len(),
                names.join(", ")
            )));
        }
        let (device, info) = describe(ordinal as c_int)?;
        let opened = failed("opening the device");
        // SAFETY: the device was given by the driver; what is retained is released in `drop`.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(&opened)?;
        let (stream, modules) = (std::ptr::null_mut(), Vec::new());
        let (state, staging) = (Mutex::default(), Mutex::default());
        let mut this = Self { info, device, context, stream, modules, state, staging };
        this.enter()?;
        this.staging = Mutex::new(Some(Staging::new().map_err(&opened)?));
        this.stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(&opened)?;
        for (name, image) in image::IMAGES {
            // SAFETY: an image as nvcc made it, whole and aligned.
            let module = unsafe { result::module::load_data(image.as_ptr().cast()) };
            let module = module.map_err(|error| {
                BackendError::Device(format!(
                    "the kernels of {name} do not load on {}: {}",
                    this.info.name,
                    words(error)
                ))
            })?;
            this.modules.push(module);
        }
        Ok(this)
    }

    /// Makes the context this thread's own. Costs next to nothing when it is already.
    fn enter(&self) -> Result<()> {
        // SAFETY: retained until `drop`.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("entering the device's context"))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory of the host that has so many bytes.
    fn host(&self, host: HostId, bytes: usize) -> Result<HostMemory> {
        let memory = self.state().hosts.get(&host).copied().filter(|memory| bytes <= memory.bytes);
        memory.ok_or_else(|| BackendError::Device(format!("no memory {host} of the host with {bytes} bytes")))
    }

    fn function(&self, name: &str) -> Result<Function> {
        let mut state = self.state();
        if let Some(&function) = state.functions.get(name) {
            return Ok(function);
        }
        let c_name = CString::new(name).map_err(|_| BackendError::Device(format!("no kernel is called {name:?}")))?;
        // SAFETY: modules are unloaded in `drop`, not before.
        let in_module = |&module| unsafe { result::module::get_function(module, c_name.clone()) }.ok();
        let function = self.modules.iter().find_map(in_module);
        let function = function.ok_or_else(|| BackendError::Device(format!("there is no kernel {name}")))?;
        self.allow_all_shared_memory(function)?;
        state.functions.insert(name.to_owned(), Function(function));
        Ok(Function(function))
    }

    /// Blocks may ask for more than 48 KiB only of functions that allow it.
    fn allow_all_shared_memory(&self, function: sys::CUfunction) -> Result<()> {
        use sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as MOST;
        use sys::CUfunction_attribute_enum::{
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as DYNAMIC, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as STATIC,
        };
        // SAFETY: device and function were given by the driver.
        let allowed = unsafe {
            result::device::get_attribute(self.device, MOST).and_then(|most| {
                let fixed = result::function::get_function_attribute(function, STATIC)?;
                result::function::set_function_attribute(function, DYNAMIC, most - fixed)
            })
        };
        allowed.map_err(failed("allowing shared memory"))
    }
}

impl State {
    fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

impl HostMemory {
    /// Gives it back.
    ///
    /// # Safety
    /// Nothing is being copied to it any more, and the context is the thread's own.
    unsafe fn free(self) {
        // SAFETY: taken by `take_host`; given back once. Errors cannot be told to anybody.
        unsafe {
            let _ = result::free_host(self.at.cast());
            let _ = result::event::destroy(self.copied);
        }
    }
}

impl Staging {
    fn new() -> Result<Self, DriverError> {
        let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let copied = [event()?, event()?];
        // SAFETY: given back by `free` only.
        let at = unsafe { result::malloc_host(2 * HALF_BYTES, 0) }?;
        Ok(Self { at: at.cast(), copied, half: 0, used: 0 })
    }

    /// Uploads at most a half. `from` may be used again at once.
    fn upload(&mut self, to: Address, from: &[u8], stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: the events live until `free`; the stream is the device's own.
        unsafe {
            if self.used + from.len() > HALF_BYTES {
                result::event::record(self.copied[self.half], stream)?;
                (self.half, self.used) = (1 - self.half, 0);
                result::event::synchronize(self.copied[self.half])?;
            }
        }
        let first = self.half * HALF_BYTES + self.used;
        self.used += from.len();
        // SAFETY: within the half, no byte of which is written again before its event says that it has been copied. Callers
        // own what is written on the device.
        unsafe {
            let place = std::slice::from_raw_parts_mut(self.at.add(first), from.len());
            place.copy_from_slice(from);
            result::memcpy_htod_async(to, place, stream)
        }
    }

    /// Gives everything back.
    ///
    /// # Safety
    /// Nothing is being copied any more, and the context is the thread's own.
    unsafe fn free(self) {
        // SAFETY: taken in `new`; given back once. Errors cannot be told to anybody.
        unsafe {
            let _ = result::free_host(self.at.cast());
            for event in self.copied {
                let _ = result::event::destroy(event);
            }
        }
    }
}

impl Driver for Nvidia {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_bytes(&self) -> Result<u64> {
        self.enter()?;
        result::mem_get_info().map(|(free, _)| free as u64).map_err(failed("asking for free memory"))
    }

    fn take(&self, what: &'static str, bytes: usize) -> Result<Address> {
        self.enter()?;
        // SAFETY: given back by `give_back` only.
        unsafe { result::malloc_sync(bytes) }.map_err(|DriverError(error)| match error {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY | sys::CUresult::CUDA_ERROR_INVALID_VALUE => {
                BackendError::OutOfMemory { what, bytes }
            }
            other => failed("taking memory")(DriverError(other)),
        })
    }

    fn give_back(&self, at: Address) {
        // Nobody is left who could do anything about an error. Freeing waits for what still uses the memory.
        if self.enter().is_ok() {
            // SAFETY: taken by `take`; its owner is being dropped.
            let _ = unsafe { result::free_sync(at) };
        }
    }

    fn fill(&self, at: Address, byte: u8, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: callers fill memory that they own.
        unsafe { result::memset_d8_async(at, byte, bytes, self.stream) }.map_err(failed("filling memory"))
    }

    fn upload(&self, to: Address, from: &[u8]) -> Result<()> {
        self.enter()?;
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(staging) = staging.as_mut() else { return Err(BackendError::Device("no pinned memory".into())) };
        for (number, piece) in from.chunks(HALF_BYTES).enumerate() {
            let to = to + (number * HALF_BYTES) as Address;
            staging.upload(to, piece, self.stream).map_err(failed("uploading"))?;
        }
        Ok(())
    }

    fn download(&self, to: &mut [u8], from: Address) -> Result<()> {
        self.enter()?;
        // SAFETY: callers own what is read; the stream is waited for before `to` is let go.
        unsafe { result::memcpy_dtoh_async(to, from, self.stream) }.map_err(failed("downloading"))?;
        self.synchronize()
    }

    fn take_host(&self, what: &'static str, bytes: usize) -> Result<HostId> {
        self.enter()?;
        let copied = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let copied = copied.map_err(failed("taking memory of the host"))?;
        // SAFETY: given back by `give_back_host` only.
        let at = unsafe { result::malloc_host(bytes.max(1), 0) };
        let at = at.map_err(|_| BackendError::OutOfMemory { what, bytes })?.cast();
        let mut state = self.state();
        let id = state.next_id();
        state.hosts.insert(id, HostMemory { at, bytes, copied });
        Ok(id)
    }

    fn give_back_host(&self, host: HostId) {
        let found = self.state().hosts.remove(&host);
        if let Some(memory) = found
            && self.synchronize().is_ok()
        {
            // SAFETY: everything has run, and it was in the map, so it has not been given back before.
            unsafe { memory.free() };
        }
    }

    fn download_later(&self, host: HostId, first: usize, from: Address, bytes: usize) -> Result<()> {
        self.enter()?;
        let HostMemory { at, copied, .. } = self.host(host, first + bytes)?;
        // SAFETY: as many bytes are there, and nobody reads them before the event says that they have been copied. Callers
        // own what is read on the device.
        let sent = unsafe {
            let to = std::slice::from_raw_parts_mut(at.add(first), bytes);
            result::memcpy_dtoh_async(to, from, self.stream).and_then(|()| result::event::record(copied, self.stream))
        };
        sent.map_err(failed("downloading"))
    }

    fn read_host(&self, to: &mut [u8], host: HostId) -> Result<()> {
        self.enter()?;
        let HostMemory { at, copied, .. } = self.host(host, to.len())?;
        // SAFETY: the event was made with the memory; after it nothing writes there until the next `download_later`.
        unsafe {
            result::event::synchronize(copied).map_err(failed("the device failed"))?;
            at.copy_to_nonoverlapping(to.as_mut_ptr(), to.len());
        }
        Ok(())
    }

    fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: callers own both.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }.map_err(failed("copying"))
    }

    fn launch(&self, launch: &Launch) -> Result<()> {
        self.enter()?;
        let function = self.function(&launch.kernel)?;
        let [x, y, z] = launch.grid;
        let bits = launch.arguments.iter().map(|argument| &raw const argument.bits);
        let mut arguments: Vec<*mut c_void> = bits.map(|bits| bits.cast_mut().cast()).collect();
        // SAFETY: the driver reads as many bytes of each argument as the kernel's parameter has, which the shim checks in
        // tests to be those of its kind; what kernels do to memory is checked there too.
        let launched = unsafe {
            result::launch_kernel(
                function.0,
                (x, y, z),
                (launch.threads, 1, 1),
                launch.shared_bytes,
                self.stream,
                &mut arguments,
            )
        };
        launched.map_err(|error| BackendError::Device(format!("launching {}: {}", launch.kernel, words(error))))
    }

    fn synchronize(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream lives until `drop`.
        unsafe { result::stream::synchronize(self.stream) }.map_err(failed("the device failed"))
    }

    fn begin_recording(&self) -> Result<()> {
        self.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives until `drop`.
        unsafe { result::stream::begin_capture(self.stream, mode) }.map_err(failed("recording a graph"))
    }

    fn end_recording(&self) -> Result<GraphId> {
        self.enter()?;
        let recorded = failed("recording a graph");
        // SAFETY: the stream lives until `drop`.
        let graph = unsafe { result::stream::end_capture(self.stream) }.map_err(&recorded)?;
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        // SAFETY: the graph was given by the driver two lines above, and is not used after `destroy`.
        let instance = unsafe {
            let instance = result::graph::instantiate(graph, flags);
            let _ = result::graph::destroy(graph);
            instance.map_err(&recorded)?
        };
        let mut state = self.state();
        let id = state.next_id();
        state.graphs.insert(id, Graph(instance));
        Ok(id)
    }

    fn replay(&self, graph: GraphId) -> Result<()> {
        self.enter()?;
        let found = self.state().graphs.get(&graph).copied();
        let Graph(graph) = found.ok_or_else(|| BackendError::Device(format!("no graph {graph}")))?;
        // SAFETY: graph and stream live until they are dropped.
        unsafe { result::graph::launch(graph, self.stream) }.map_err(failed("running a graph"))
    }

    fn drop_graph(&self, graph: GraphId) {
        let found = self.state().graphs.remove(&graph);
        // It may still run: what was begun ahead nobody has waited for.
        if let Some(Graph(graph)) = found
            && self.synchronize().is_ok()
        {
            // SAFETY: it was in the map, so it has not been destroyed before, and it does not run.
            let _ = unsafe { result::graph::exec_destroy(graph) };
        }
    }
}

impl Drop for Nvidia {
    fn drop(&mut self) {
        if self.enter().is_err() {
            return;
        }
        let graphs: Vec<Graph> = self.state().graphs.drain().map(|(_, graph)| graph).collect();
        let hosts: Vec<HostMemory> = self.state().hosts.drain().map(|(_, memory)| memory).collect();
        let staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner).take();
        // SAFETY: everything was given by the driver, and nobody is left to use it. Errors cannot be told to anybody.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            for Graph(graph) in graphs {
                let _ = result::graph::exec_destroy(graph);
            }
            if let Some(staging) = staging {
                staging.free();
            }
            hosts.into_iter().for_each(|memory| memory.free());
            for &module in &self.modules {
                let _ = result::module::unload(module);
            }
            if !self.stream.is_null() {
                let _ = result::stream::destroy(self.stream);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}
