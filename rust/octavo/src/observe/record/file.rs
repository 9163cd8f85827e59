//! The file of a log: where a recording may go, and what is not even opened.

use std::fs::{File, Metadata, TryLockError};
use std::io::{Error, ErrorKind, Read, Result, Seek};
use std::path::Path;

use super::chunks::{MAGIC_BYTES, is_log};

/// The file that a recording goes into, and whether it is a new one. It is locked until it is closed, and still as it was:
/// it may turn out that there is nothing to record.
pub fn to_write(path: &Path) -> Result<(File, bool)> {
    let before = match std::fs::metadata(path) {
        Ok(found) => Some(found),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    // Opening a pipe waits for its other end, and a reader that stops would stop the recording.
    before.as_ref().map_or(Ok(()), |found| file_or(found, is_device(found)))?;
    let mut file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
    let found = file.metadata()?;
    file_or(&found, is_device(&found))?;
    if found.is_file() {
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return refused("another recording is being written into this file"),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let mut begin = Vec::new();
        (&file).take(MAGIC_BYTES).read_to_end(&mut begin)?;
        file.rewind()?;
        if !begin.is_empty() && !is_log(&begin) {
            return refused("this file is no octavo log, so it is not written over; give another path, or remove it");
        }
    }
    Ok((file, before.is_none()))
}

/// The file of a log, and its length.
pub fn to_read(path: &Path) -> Result<(File, u64)> {
    // A pipe has no end that could be asked for, and opening one waits.
    file_or(&std::fs::metadata(path)?, false)?;
    let file = File::open(path)?;
    let found = file.metadata()?;
    file_or(&found, false)?;
    Ok((file, found.len()))
}

fn file_or(found: &Metadata, otherwise: bool) -> Result<()> {
    match (found.is_file() || otherwise, found.is_dir()) {
        (true, _) => Ok(()),
        (_, true) => Err(ErrorKind::IsADirectory.into()),
        _ => Err(Error::new(ErrorKind::InvalidInput, "a log is a regular file, and this is none")),
    }
}

/// Such as `/dev/null`, for who wants to know what recording costs.
fn is_device(found: &Metadata) -> bool {
    use std::os::unix::fs::FileTypeExt;
    found.file_type().is_char_device()
}

fn refused<T>(why: &str) -> Result<T> {
    Err(Error::new(ErrorKind::AlreadyExists, why))
}
