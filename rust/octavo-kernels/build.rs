//! Compiles the CUDA kernels: with nvcc, where there is one, to images that are embedded; and with the feature
//! `cuda-shim` also with the host's C++ compiler, for tests without a GPU. Only files that changed are compiled again.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;
use std::{env, fs};

/// What the images are for: machine code for the architectures that matter most, and portable code for all later ones.
const ARCHITECTURES: [&str; 3] =
    ["arch=compute_80,code=sm_80", "arch=compute_90a,code=sm_90a", "arch=compute_80,code=compute_80"];

fn main() {
    println!("cargo::rerun-if-changed=cu");
    for name in ["NVCC", "CUDA_HOME", "CUDA_PATH", "CXX"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let kernels = sources();
    let nvcc = nvcc();
    let images = nvcc.as_ref().map_or_else(Vec::new, |nvcc| compile_images(nvcc, &kernels, &out));
    write_images(&images, nvcc.as_deref().and_then(version), &out);
    if env::var_os("CARGO_FEATURE_CUDA_SHIM").is_some() {
        compile_shim(&kernels, &out);
    }
}

/// The files that hold kernels, in order.
fn sources() -> Vec<PathBuf> {
    let files = fs::read_dir("cu").expect("cu/ lies beside this file").map(|file| file.expect("readable").path());
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|end| end == "cu")).collect();
    files.sort();
    files
}

/// `$NVCC`, that of `$CUDA_HOME` or `$CUDA_PATH`, or the one on the path.
fn nvcc() -> Option<PathBuf> {
    let in_home = |name| env::var_os(name).map(|home| Path::new(&home).join("bin/nvcc"));
    let on_path = env::var_os("PATH").map(|path| env::split_paths(&path).map(|folder| folder.join("nvcc")).collect());
    let on_path: Vec<PathBuf> = on_path.unwrap_or_default();
    let named = [env::var_os("NVCC").map(PathBuf::from), in_home("CUDA_HOME"), in_home("CUDA_PATH")];
    named.into_iter().flatten().chain(on_path).find(|nvcc| nvcc.is_file())
}

fn compile_images(nvcc: &Path, kernels: &[PathBuf], out: &Path) -> Vec<PathBuf> {
    let image = |source: &PathBuf| {
        let image = out.join(stem(source)).with_extension("fatbin");
        let mut command = Command::new(nvcc);
        // A fused multiply-add is written as one where it is meant: results must not depend on what a compiler fuses.
        command.args(["-fatbin", "--compress-mode=size", "-std=c++17", "-O3", "-fmad=false"]);
        command.args(ARCHITECTURES.iter().flat_map(|architecture| ["-gencode", architecture]));
        compile(command, source, &image);
        image
    };
    kernels.iter().map(image).collect()
}

/// The version of CUDA that an nvcc is of: `… release 13.0, V13.0.88` is (13, 0).
fn version(nvcc: &Path) -> Option<(u32, u32)> {
    let output = Command::new(nvcc).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (major, minor) = text.split("release ").nth(1)?.split(',').next()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// `IMAGES`: a name and the bytes of every image. `TOOLKIT`: what compiled them.
fn write_images(images: &[PathBuf], toolkit: Option<(u32, u32)>, out: &Path) {
    let entry = |image: &PathBuf| format!("({:?}, &Aligned(*include_bytes!({image:?})).0),\n", stem(image));
    let entries: String = images.iter().map(entry).collect();
    let text = format!(
        "pub(super) static IMAGES: &[(&str, &[u8])] = &[\n{entries}];\nconst TOOLKIT: Option<(u32, u32)> = {toolkit:?};\n"
    );
    fs::write(out.join("images.rs"), text).expect("OUT_DIR can be written to");
}

fn compile_shim(kernels: &[PathBuf], out: &Path) {
    let compiler = env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let object = |source: &PathBuf| {
        let object = out.join(stem(source)).with_extension("o");
        let mut command = Command::new(&compiler);
        command.args(["-std=c++17", "-O2", "-fPIC", "-march=native", "-ffp-contract=off", "-DOCTAVO_SHIM"]);
        command.args(["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function"]);
        command.args(["-fno-exceptions", "-fno-rtti", "-x", "c++", "-c"]);
        compile(command, source, &object);
        object
    };
    let of_shim = ["cu/shim/shim.cpp", "cu/shim/check.cu"].map(PathBuf::from);
    let objects: Vec<PathBuf> = kernels.iter().chain(&of_shim).map(object).collect();
    let archive = out.join("liboctavo_shim.a");
    let _ = fs::remove_file(&archive);
    run(Command::new(env::var_os("AR").unwrap_or_else(|| "ar".into())).arg("crs").arg(&archive).args(&objects));
    println!("cargo::rustc-link-search=native={}", out.display());
    // Whole: nothing refers to kernels but a list that each of them enters when the program starts.
    println!("cargo::rustc-link-lib=static:+whole-archive=octavo_shim");
    println!("cargo::rustc-link-lib=stdc++");
}

/// Runs `command` on `source` unless `output` is newer than it and every header.
fn compile(mut command: Command, source: &Path, output: &Path) {
    let made = modified(output);
    let headers = ["cu", "cu/shim"].into_iter().flat_map(|folder| fs::read_dir(folder).expect("readable"));
    let headers = headers.map(|file| file.expect("readable").path());
    let headers = headers.filter(|path| path.extension().is_some_and(|end| end == "cuh" || end == "hpp"));
    let newest = headers.chain([source.to_owned(), PathBuf::from("build.rs")]).filter_map(|path| modified(&path)).max();
    if made.is_none() || made < newest {
        run(command.arg(source).arg("-o").arg(output));
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} cannot be run: {error}"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{text}", output.status);
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|data| data.modified()).ok()
}

fn stem(path: &Path) -> String {
    path.file_stem().expect("a file has a name").to_string_lossy().into_owned()
}
