//! The finding of `doctor` about userfaultfd, which paging needs.

use super::{Access, Features, Serving, UffdError, probe};
use pagetax_core::finding::{Feature, Finding};

/// Does the handshake with userfaultfd that a region of network memory does. Opening it is not enough:
/// older kernels lack features that paging needs.
pub fn user_faults() -> Finding {
    let full = probe(false, Serving::Thread);
    let restricted = match &full {
        Err(UffdError::NotAllowed { .. }) => Some(probe(true, Serving::Thread)),
        _ => None,
    };
    let has_device = std::path::Path::new("/dev/userfaultfd").exists();
    user_faults_of(full, restricted, has_device)
}

type Probed = Result<(Access, Features), UffdError>;

fn user_faults_of(full: Probed, restricted: Option<Probed>, has_device: bool) -> Finding {
    let feature = Feature("user_faults", "serving faults from user space (userfaultfd)");
    // A member of the device's group can serve all faults, regardless of the setting for the system
    // call.
    let for_this_user = match has_device {
        true => "sudo chgrp $(id -gn) /dev/userfaultfd && sudo chmod 0660 /dev/userfaultfd",
        false => "sudo sysctl vm.unprivileged_userfaultfd=1",
    };
    match (full, restricted) {
        (Ok((_, features)), _) if features.can_move() => {
            feature.works("faults in user mode and in the kernel; pages are moved")
        }
        (Ok(_), _) => feature.works(
            "faults in user mode and in the kernel; pages are copied, as they cannot be moved (Linux 6.8): no \
             device may write to paged memory",
        ),
        (Err(UffdError::NotAllowed { source, .. }), Some(Ok(_))) => feature.limited(
            format!("faults in user mode only ({source}): no `pagetax remote`"),
            for_this_user,
        ),
        (Err(UffdError::NotAllowed { source, .. }), _) => {
            feature.not_here(source.to_string(), for_this_user)
        }
        (Err(error), _) => feature.never_here(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::remedy;
    use super::*;
    use pagetax_core::finding::Standing;
    use std::io;

    fn refused() -> UffdError {
        let source = io::Error::from_raw_os_error(libc::EPERM);
        UffdError::NotAllowed { source, remedy: remedy(true) }
    }

    #[test]
    fn what_a_kernel_lacks_for_paging_is_said() {
        let full = |features| user_faults_of(Ok((Access::Full, features)), None, true);
        assert!(full(Features::All).detail.ends_with("pages are moved"));
        for features in [Features::NoMove, Features::NoMoveNoPoison] {
            let finding = full(features);
            assert_eq!(finding.standing, Standing::Works);
            assert!(finding.detail.contains("Linux 6.8"), "{finding:?}");
        }
        let old = user_faults_of(Err(UffdError::TooOld), None, false);
        assert_eq!((old.standing, old.enable), (Standing::NotHere, None));
        assert!(old.detail.contains("Linux 5.10"), "{}", old.detail);
    }

    #[test]
    fn the_remedy_is_one_of_this_kernel() {
        let restricted = || Some(Ok((Access::UserModeOnly, Features::All)));
        let with_device = user_faults_of(Err(refused()), restricted(), true);
        assert_eq!(with_device.standing, Standing::Limited);
        assert!(with_device.enable.unwrap().contains("chgrp"));
        let without = user_faults_of(Err(refused()), Some(Err(refused())), false);
        assert_eq!(without.standing, Standing::NotHere);
        assert!(without.enable.unwrap().contains("vm.unprivileged_userfaultfd=1"));
        // A user who has the permission, on a kernel that is too old, gets no hint.
        let old = user_faults_of(Err(refused()), Some(Err(UffdError::TooOld)), true);
        assert_eq!(old.standing, Standing::NotHere);
    }
}
