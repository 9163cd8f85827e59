//! What the CPU's stand-in for a GPU catches, and that it does what the hardware does.

use half::{bf16, f16};
use octavo_kernels::cuda::Device;
use octavo_kernels::cuda::device::Memory;
use octavo_kernels::reference::e4m3;

use crate::harness::Random;

/// 64 floats, fresh: not numbers.
fn output(device: &Device) -> Memory {
    device.take("a test", 64 * 4).unwrap()
}

fn floats(device: &Device, memory: &Memory) -> Vec<f32> {
    let mut bytes = vec![0; memory.bytes()];
    device.driver().download(&mut bytes, memory.at()).unwrap();
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn numbers(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| (i as f32).to_le_bytes()).collect()
}

/// Runs a kernel whose one argument is 64 floats; what it wrote, or the error.
fn run(kernel: &str, threads: usize) -> Result<Vec<f32>, String> {
    let device = Device::shim().unwrap();
    let out = output(&device);
    device.launch(kernel, [1], threads).pointer(out.at()).go();
    device.failure().map_or_else(|| Ok(floats(&device, &out)), Err)
}

fn assert_says(result: Result<Vec<f32>, String>, words: &[&str]) {
    let said = result.expect_err("an error");
    assert!(words.iter().all(|word| said.contains(word)), "{said:?} says nothing of {words:?}");
}

#[test]
fn accesses_are_checked() {
    let device = Device::shim().unwrap();
    let small = device.take("a test", 4 * 40).unwrap();
    device.launch("check_outside", [1], 64).pointer(small.at()).go();
    let said = device.failure().unwrap();
    // Threads go from the first to the last in the first launch of a device.
    assert!(said.contains("check_outside") && said.contains("thread 40") && said.contains("byte 160"), "{said}");
    assert_says(run("check_unaligned", 32), &["check_unaligned", "16 bytes", "aligned"]);
    assert_says(run("check_shared_outside", 32), &["thread 31", "shared"]);
}

#[test]
fn barriers_and_warps_that_not_all_reach_are_errors() {
    assert_says(run("check_divergent_barrier", 64), &["divergent barrier", "16 threads have ended"]);
    assert_says(run("check_two_barriers", 64), &["divergent barrier", "line"]);
    assert_says(run("check_missing_lane", 32), &["lanes", "do not come"]);
}

#[test]
fn a_missing_barrier_is_an_error_in_every_order_of_threads() {
    // What 64 floats become, or the error, in the launches of one device: its threads run in another order each time.
    let launches = |kernel: &str, threads: usize, how: usize| {
        let device = Device::shim().unwrap();
        let first: Vec<_> = (0..6).map(|_| output(&device)).collect();
        for out in &first {
            device.launch(kernel, [1], threads).pointer(out.at()).int(how).go();
        }
        device.failure().map_or_else(|| Ok(first.iter().map(|out| floats(&device, out)).collect::<Vec<_>>()), Err)
    };
    let nth = |kernel: &str, threads: usize, how: usize, number: usize| {
        let device = Device::shim().unwrap();
        let out = output(&device);
        (0..number).for_each(|_| device.launch("check_votes", [1], 32).pointer(out.at()).go());
        device.launch(kernel, [1], threads).pointer(out.at()).int(how).go();
        Err(device.failure().unwrap_or_default())
    };
    for out in launches("check_neighbour", 64, 3).unwrap() {
        assert_eq!(out, (0..64).map(|i| ((i + 1) % 64) as f32).collect::<Vec<_>>());
    }
    for out in launches("check_lanes", 32, 1).unwrap() {
        assert_eq!(out[..32], (0..32).map(|i| (i ^ 1) as f32).collect::<Vec<_>>());
    }
    for out in launches("check_count", 64, 1).unwrap() {
        assert!(out.iter().all(|count| count.to_bits() == 64), "{out:?}");
    }
    for number in 0..6 {
        for waits in 0..3 {
            assert_says(nth("check_neighbour", 64, waits, number), &["a race", "thread", "no barrier"]);
        }
        assert_says(nth("check_lanes", 32, 0, number), &["a race", "thread", "no barrier"]);
        assert_says(nth("check_count", 64, 0, number), &["a race", "atomic"]);
    }
}

#[test]
fn copies_take_place_when_they_are_waited_for() {
    let device = Device::shim().unwrap();
    let x = device.take_with("a test", &numbers(64)).unwrap();
    let out = output(&device);
    device.launch("check_copies", [1], 32).pointer(out.at()).pointer(x.at()).go();
    assert_eq!(device.failure(), None);
    assert_eq!(floats(&device, &out), (0..64).map(|i| i as f32).collect::<Vec<_>>());
    device.launch("check_half_of_copies", [1], 32).pointer(out.at()).pointer(x.at()).go();
    let said = device.failure().unwrap();
    assert!(said.contains("a race: it reads") && said.contains("an asynchronous copy writes"), "{said}");
    let device = Device::shim().unwrap();
    let x = device.take_with("a test", &numbers(64)).unwrap();
    device.launch("check_forgotten_copies", [1], 32).pointer(x.at()).go();
    assert!(device.failure().unwrap().contains("nobody waited"));
}

#[test]
fn launches_that_do_not_fit_the_kernel_are_errors() {
    let refused = |launch: &dyn Fn(&Device, &Memory)| {
        let device = Device::shim().unwrap();
        let out = output(&device);
        launch(&device, &out);
        Err(device.failure().unwrap_or_default())
    };
    let out = |device: &Device, threads: usize, kernel: &str| device.launch(kernel, [1], threads).go();
    assert_says(refused(&|device, _| out(device, 64, "check_outside")), &["0 arguments for 1"]);
    assert_says(refused(&|device, _| out(device, 64, "no_such_kernel")), &["no_such_kernel"]);
    let launch = |device: &Device, memory: &Memory, threads| {
        device.launch("check_outside", [1], threads).pointer(memory.at()).go();
    };
    assert_says(refused(&|device, memory| launch(device, memory, 33)), &["whole warps"]);
    assert_says(refused(&|device, memory| launch(device, memory, 96)), &["up to 64"]);
    // What every GPU has; some have more.
    let with = |device: &Device, memory: &Memory, grid: [usize; 3], shared: usize| {
        device.launch("check_outside", grid, 64).shared(shared).pointer(memory.at()).go();
    };
    assert_says(refused(&|device, memory| with(device, memory, [1, 65_536, 1], 0)), &["65535"]);
    assert_says(
        refused(&|device, memory| with(device, memory, [1, 1, 1], 100 << 10)),
        &["102400 bytes of shared memory"],
    );
    assert_says(
        refused(&|device, _| device.launch("check_outside", [1], 64).int(1).go()),
        &["a pointer", "an integer"],
    );
    assert_says(refused(&|device, _| device.launch("check_outside", [1], 64).pointer(64).go()), &["no allocation"]);
}

#[test]
fn tensor_cores_multiply() {
    let random = &mut Random::new(7);
    let device = Device::shim().unwrap();
    let (a, b) = (random.normals(16 * 16), random.normals(16 * 8));
    let check = |kernel: &str, encode: fn(f32) -> ([u8; 2], f32)| {
        let upload = |values: &[f32]| values.iter().flat_map(|&x| encode(x).0).collect::<Vec<u8>>();
        let [a_there, b_there] = [&a, &b].map(|values| device.take_with("a test", &upload(values)).unwrap());
        let out = device.take("a test", 16 * 8 * 4).unwrap();
        device.launch(kernel, [1], 32).pointer(out.at()).pointer(a_there.at()).pointer(b_there.at()).go();
        assert_eq!(device.failure(), None);
        for (i, got) in floats(&device, &out).into_iter().enumerate() {
            let product = |k: usize| f64::from(encode(a[i / 8 * 16 + k]).1) * f64::from(encode(b[k * 8 + i % 8]).1);
            let wanted: f64 = (0..16).map(product).sum();
            assert!((f64::from(got) - wanted).abs() < 1e-5, "{kernel} {i}: {got}, wanted {wanted}");
        }
    };
    check("check_mma_bf16", |x| (bf16::from_f32(x).to_le_bytes(), bf16::from_f32(x).to_f32()));
    check("check_mma_f16", |x| (f16::from_f32(x).to_le_bytes(), f16::from_f32(x).to_f32()));
}

#[test]
fn eight_bit_floats_are_read_and_written() {
    let mut x: Vec<f32> =
        (0..=0xff).map(|code| f32::from_bits(((code & 0x80) << 24) | (((code & 0x7f) << 20) + 0x3c00_0000))).collect();
    let random = &mut Random::new(3);
    for exponent in -14..12 {
        x.extend(random.normals(64).into_iter().map(|x| x * 2f32.powi(exponent)));
    }
    x.extend([f32::NAN, f32::INFINITY, -f32::INFINITY, f32::MAX, 0.0, -0.0, f32::from_bits(1)]);
    let device = Device::shim().unwrap();
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    let (there, out) = (device.take_with("a test", &bytes).unwrap(), device.take("a test", 16 * x.len()).unwrap());
    device.launch("check_e4m3", [1], 32).pointer(out.at()).pointer(there.at()).int(x.len()).go();
    assert_eq!(device.failure(), None);
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    for (i, got) in floats(&device, &out).chunks(4).enumerate() {
        let code = i % 256;
        // Of the smallest codes the ones that this says are wrong: their exponent is that of the next.
        let value = match code % 128 {
            0x7f => f32::NAN,
            small @ 0..8 => small as f32 / 512.0,
            _ => x[code].abs(),
        };
        let value = if code < 128 { value } else { -value };
        assert!(same(got[0], value) && same(got[2], value), "code {code}: {got:?}, wanted {value}");
        let rounded = e4m3::round(x[i]);
        assert!(same(got[1], rounded) && same(got[3], rounded), "{}: {got:?}, wanted {rounded}", x[i]);
    }
}

#[test]
fn votes_and_shuffles() {
    let wanted: Vec<f32> = (0..32).map(|i: i32| (i - 1).max(0) as f32).collect();
    assert_eq!(run("check_votes", 32).unwrap()[..32], wanted);
}

#[test]
fn graphs_are_recorded_and_run_as_often_as_wanted() {
    let device = Device::shim().unwrap();
    let (driver, out) = (device.driver(), output(&device));
    let host = driver.take_host("a test", 8).unwrap();
    device.launch("check_votes", [1], 32).pointer(out.at()).go();
    driver.fill(out.at(), 0, out.bytes()).unwrap();
    driver.begin_recording().unwrap();
    device.launch("check_votes", [1], 32).pointer(out.at()).go();
    driver.copy(out.offset(32 * 4), out.at(), 32 * 4).unwrap();
    assert!(driver.upload(out.at(), &[0; 4]).unwrap_err().to_string().contains("while a graph is recorded"));
    assert!(driver.take("a test", 4).is_err() && driver.take_host("a test", 4).is_err());
    assert!(driver.download_later(host, 0, out.at(), 4).unwrap_err().to_string().contains("while a graph is recorded"));
    assert!(driver.read_host(&mut [0; 4], host).is_err() && driver.synchronize().is_err());
    let graph = driver.end_recording().unwrap();
    assert!(floats(&device, &out).iter().all(|&x| x == 0.0), "recording runs nothing");
    for _ in 0..2 {
        driver.fill(out.at(), 0, out.bytes()).unwrap();
        driver.replay(graph).unwrap();
        let got = floats(&device, &out);
        assert!(got[31] == 30.0 && got[..32] == got[32..], "{got:?}");
    }
    driver.drop_graph(graph);
    assert!(driver.replay(graph).is_err());
}

/// A driver loads a kernel when it is first launched, and frees memory when nothing uses it: neither goes with recording.
#[test]
fn what_would_spoil_a_graph_is_an_error() {
    let device = Device::shim().unwrap();
    let out = output(&device);
    let recorded = device.record(|| device.launch("check_votes", [1], 32).pointer(out.at()).go());
    assert_eq!(recorded, None);
    let said = device.failure().unwrap();
    assert!(said.contains("check_votes") && said.contains("first time"), "{said}");
    let device = Device::shim().unwrap();
    let out = output(&device);
    assert_eq!(device.record(|| drop(out)), None);
    assert!(device.failure().unwrap().contains("given back while a graph is recorded"));
}

#[test]
fn memory_of_the_host_gets_what_is_sent_to_it() {
    let device = Device::shim().unwrap();
    let x = device.take_with("a test", &numbers(4)).unwrap();
    let host = device.driver().take_host("a test", 12).unwrap();
    device.driver().download_later(host, 0, x.offset(4), 4).unwrap();
    device.driver().download_later(host, 4, x.offset(8), 8).unwrap();
    let mut got = [0; 12];
    device.driver().read_host(&mut got, host).unwrap();
    assert_eq!(got[..], numbers(4)[4..]);
    assert!(device.driver().download_later(host, 8, x.at(), 8).is_err(), "beyond its end");
    assert!(device.driver().download_later(host, 0, x.offset(8), 12).is_err(), "from beyond the other's");
    device.driver().give_back_host(host);
    assert!(device.driver().read_host(&mut got, host).is_err());
}

#[test]
fn memory_is_poisoned_checked_and_given_back() {
    let device = Device::shim().unwrap();
    let free = device.driver().free_bytes().unwrap();
    let memory = device.take("a test", 4096).unwrap();
    assert_eq!(device.driver().free_bytes().unwrap(), free - 4096);
    assert!(floats(&device, &memory).iter().all(|x| x.is_nan()));
    assert!(device.driver().upload(memory.offset(4090), &[0; 7]).unwrap_err().to_string().contains("4090"));
    drop(memory);
    assert_eq!(device.driver().free_bytes().unwrap(), free);
    assert!(device.take("a test", free as usize + 1).is_err());
}
