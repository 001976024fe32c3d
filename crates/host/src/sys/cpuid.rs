//! The CPUID instruction of x86-64.

/// The registers EAX, EBX, ECX and EDX.
pub type Registers = [u32; 4];

/// Returns what the CPU says about itself under this leaf and its part; zeros on another architecture.
pub fn cpuid(leaf: u32, part: u32) -> Registers {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: it only reads, and all x86-64 CPUs have it. Newer compilers know that.
        #[allow(unused_unsafe)]
        let found = unsafe { std::arch::x86_64::__cpuid_count(leaf, part) };
        [found.eax, found.ebx, found.ecx, found.edx]
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (leaf, part);
        Registers::default()
    }
}
