//! From a driver's library to a device whose kernels are loaded; and when there is none of something, what and why.

use std::ffi::{CStr, c_int, c_void};

use cudarc::driver::result;
use cudarc::driver::sys;

use super::{failed, words};
use crate::cuda::driver::DeviceInfo;
use crate::cuda::image;
use crate::{BackendError, Result};

/// The library that is looked for.
const LIBRARY: &str = "libcuda.so.1";
/// The oldest driver that has every function that is called.
const OLDEST_DRIVER: Version = Version(12, 0);
/// The kernels are written for devices from here on.
const LEAST_CAPABILITY: (u32, u32) = (8, 0);

/// A version of CUDA: that of a compiler, or the newest that a driver is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(pub u32, pub u32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// Opens the driver's library and starts it; what it is for. An error says what was looked for and where.
fn start() -> Result<Version> {
    // SAFETY: opening the driver's library runs its initialisers, which is what it is for.
    if !unsafe { sys::is_culib_present() } {
        let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        return Err(BackendError::Unsupported(format!(
            "there is no CUDA driver for a device: the dynamic linker finds no {LIBRARY} (nor libcuda.so) in \
             LD_LIBRARY_PATH ({path:?}), its cache or the system's folders; it comes with NVIDIA's driver, not with a toolkit"
        )));
    }
    let mut number = 0;
    // SAFETY: the number outlives the call, which may be the first of all.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut number) }.result();
    let driver = Version(number as u32 / 1000, number as u32 % 1000 / 10);
    match asked.map_err(failed("asking for the CUDA driver's version")) {
        // Its functions cannot even be looked for.
        Ok(()) if driver < OLDEST_DRIVER => Err(BackendError::Unsupported(format!(
            "the driver here is for CUDA {driver}; octavo needs one for {} or later",
            image::toolkit().map_or(OLDEST_DRIVER, |(major, minor)| Version(major, minor))
        ))),
        asked => asked.and_then(|()| result::init().map_err(failed("the CUDA driver does not start"))).map(|()| driver),
    }
}

/// What every device of this machine is; an error if there is no driver.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    start()?;
    (0..count()?).map(|ordinal| Ok(describe(ordinal)?.1)).collect()
}

fn count() -> Result<c_int> {
    result::device::get_count().map_err(failed("counting devices"))
}

/// Device number `ordinal`, if it can run the kernels, and what its driver is for.
pub(super) fn find(ordinal: usize) -> Result<(sys::CUdevice, DeviceInfo, Version)> {
    if image::IMAGES.is_empty() {
        return Err(BackendError::Unsupported(
            "this build of octavo has no kernels for a CUDA device: it was built without nvcc ($NVCC, \
             $CUDA_HOME/bin/nvcc or nvcc on the path)"
                .to_owned(),
        ));
    }
    let driver = start()?;
    let count = count()?;
    let Some(number) = c_int::try_from(ordinal).ok().filter(|&number| number < count) else {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES");
        let visible = visible.map_or(String::new(), |list| format!(", with CUDA_VISIBLE_DEVICES={list:?}"));
        return Err(BackendError::Device(format!(
            "there is no device cuda:{ordinal}: the driver knows {count}, counted from 0{visible}"
        )));
    };
    let (device, info) = describe(number)?;
    if info.capability < LEAST_CAPABILITY {
        let ((major, minor), (least, _)) = (info.capability, LEAST_CAPABILITY);
        return Err(BackendError::Unsupported(format!(
            "cuda:{ordinal}, {}, has compute capability {major}.{minor}; the kernels need {least}.0 or later",
            info.name
        )));
    }
    Ok((device, info, driver))
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

/// Loads an image into the thread's context; an error says what the driver's compiler has to say.
pub(super) fn load(name: &str, bytes: &[u8], info: &DeviceInfo, driver: Version) -> Result<sys::CUmodule> {
    use sys::CUjit_option::{CU_JIT_ERROR_LOG_BUFFER as LOG, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as LOG_BYTES};
    let mut log = [0u8; 2048];
    // The last byte stays, so that there is an end.
    let log_bytes = log.len() - 1;
    let mut options = [LOG, LOG_BYTES];
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(log_bytes)];
    let mut module = std::ptr::null_mut();
    // SAFETY: an image as nvcc made it, whole and aligned; as many options as values, and as many bytes of log as they say.
    let loaded = unsafe {
        let (count, options) = (options.len() as u32, options.as_mut_ptr());
        sys::cuModuleLoadDataEx(&raw mut module, bytes.as_ptr().cast(), count, options, values.as_mut_ptr()).result()
    };
    loaded.map(|()| module).map_err(|error| {
        let log = CStr::from_bytes_until_nul(&log).map_or_else(|_| "".into(), CStr::to_string_lossy);
        let toolkit = image::toolkit().map(|(major, minor)| Version(major, minor));
        let (reason, why) = (words(error), why_not(toolkit, driver));
        BackendError::Device(
            format!("the kernels of {name} do not load on {}: {reason}{why} {log}", info.name).trim_end().to_owned(),
        )
    })
}

/// What a driver that is older than the compiler has to do with kernels that do not load.
fn why_not(toolkit: Option<Version>, driver: Version) -> String {
    let Some(toolkit) = toolkit.filter(|&toolkit| driver < toolkit) else { return String::new() };
    // The releases of NVIDIA's driver that are the first for any CUDA of a major version.
    let release = match toolkit.0 {
        13 => ", which its releases from 580 on are",
        12 => ", which its releases from 525 on are",
        _ => "",
    };
    format!(
        "; they were compiled by CUDA {toolkit}, and the driver here is for CUDA {driver}: it has to be for {toolkit} or \
         later{release}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_is_too_old_is_named_and_so_is_one_that_is_not() {
        let why = why_not(Some(Version(13, 0)), Version(12, 8));
        assert!(["CUDA 13.0", "CUDA 12.8", "from 580 on"].iter().all(|word| why.contains(word)), "{why}");
        for driver in [Version(13, 0), Version(13, 2), Version(14, 0)] {
            assert_eq!(why_not(Some(Version(13, 0)), driver), "");
        }
        assert_eq!(why_not(None, Version(12, 8)), "");
    }
}
