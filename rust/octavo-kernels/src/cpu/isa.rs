//! Which instruction set this process uses: chosen once, at run time.

use super::portable::Portable;
use super::vector::{Kernel, Vector};
#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2, avx512::Avx512, limits};
use crate::{BackendError, CacheDtype, Result};

/// The environment variable that overrides the choice: `portable`, `avx2`, `avx2-vnni`, `avx512` or `avx512-bf16`.
pub const ISA_VARIABLE: &str = "OCTAVO_CPU_ISA";

/// An instruction set that this CPU has. To hold one is the proof.
#[derive(Clone, Copy, Debug)]
pub enum Isa {
    /// What the compiler makes of plain arrays.
    Portable(Portable),
    /// AVX2, FMA, F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2<false>),
    /// AVX2, FMA, F16C, AVX-VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx2Vnni(Avx2<true>),
    /// AVX-512 F, BW, DQ, VL, VNNI. (A CPU with AVX-512 but no VNNI does as well with AVX2.)
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512<false>),
    /// The same, and BF16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512<true>),
}

impl Isa {
    /// All that this CPU has, the plainest first.
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut all = vec![Self::Portable(Portable)];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Avx2::detect().map(Self::Avx2));
            all.extend(Avx2::detect().map(Self::Avx2Vnni));
            all.extend(Avx512::detect().map(Self::Avx512));
            all.extend(Avx512::detect().map(Self::Avx512Bf16));
        }
        all
    }

    /// What [`ISA_VARIABLE`] asks for, or the best that this CPU has.
    pub fn from_environment() -> Result<Self> {
        match std::env::var(ISA_VARIABLE) {
            Ok(name) => Self::named(&name),
            Err(std::env::VarError::NotPresent) => Ok(Self::best()),
            Err(error) => Err(BackendError::Unsupported(format!("{ISA_VARIABLE}: {error}"))),
        }
    }

    /// The best that this CPU has.
    pub fn best() -> Self {
        *Self::worthwhile().last().expect("every CPU has the portable one")
    }

    /// Those of [`Isa::available`] that are no slower than the ones before them.
    fn worthwhile() -> Vec<Self> {
        let mut all = Self::available();
        #[cfg(target_arch = "x86_64")]
        if matches!(all.last(), Some(Self::Avx512Bf16(v)) if !limits::has_quick_pairs(*v)) {
            all.pop();
        }
        all
    }

    /// The one of that name.
    pub fn named(name: &str) -> Result<Self> {
        let available = Self::worthwhile();
        if let Some(isa) = available.iter().find(|isa| isa.name() == name) {
            return Ok(*isa);
        }
        let names: Vec<_> = available.iter().map(|isa| isa.name()).collect();
        Err(BackendError::Unsupported(format!("{ISA_VARIABLE}={name}: this CPU and build offer {}", names.join(", "))))
    }

    /// Its name in [`ISA_VARIABLE`].
    pub fn name(self) -> &'static str {
        self.run(Name)
    }

    /// Whether it multiplies bytes in one instruction.
    pub fn has_vnni(self) -> bool {
        match self {
            Self::Portable(_) => false,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => false,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Vnni(_) | Self::Avx512(_) | Self::Avx512Bf16(_) => true,
        }
    }

    /// Whether it multiplies pairs of bfloat16 in one instruction.
    pub fn has_bf16(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(_) => true,
            _ => false,
        }
    }

    /// For people: the registers, and the instructions that matter.
    pub fn describe(self) -> String {
        let details = match (self.has_vnni(), self.has_bf16()) {
            (_, true) => " (vnni, bf16)",
            (true, false) => " (vnni)",
            (false, false) => "",
        };
        let registers = self.name().split('-').next().unwrap_or_default();
        format!("{registers}{details}")
    }

    /// The type of two bytes that attention reads keys and values fastest in.
    pub fn half_cache(self) -> CacheDtype {
        if self.has_bf16() { CacheDtype::Bf16 } else { CacheDtype::F16 }
    }

    /// Runs `kernel` compiled for this instruction set.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Self::Portable(v) => kernel.run(v),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(v) => v.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Vnni(v) => v.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(v) => v.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(v) => v.run(kernel),
        }
    }
}

struct Name;

impl Kernel for Name {
    type Output = &'static str;
    #[inline(always)]
    fn run<V: Vector>(self, _: V) -> &'static str {
        V::NAME
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_find_what_the_cpu_has_and_list_it_otherwise() {
        for isa in Isa::worthwhile() {
            assert_eq!(Isa::named(isa.name()).unwrap().name(), isa.name());
        }
        let message = Isa::named("sse9").unwrap_err().to_string();
        assert!(message.contains("sse9") && message.contains("portable"), "{message}");
    }
}
