import { LabIcon } from '@jupyterlab/ui-components';

/** Icon: four workers around shared state. */
export const nbdistIcon = new LabIcon({
  name: 'nbdist:icon',
  svgstr:
    '<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">' +
    '<g class="jp-icon3" fill="#616161">' +
    '<circle cx="12" cy="12" r="3"/><circle cx="4.5" cy="4.5" r="2.5"/>' +
    '<circle cx="19.5" cy="4.5" r="2.5"/><circle cx="4.5" cy="19.5" r="2.5"/>' +
    '<circle cx="19.5" cy="19.5" r="2.5"/>' +
    '<path d="M5.2 3.8 20.2 18.8 18.8 20.2 3.8 5.2zM18.8 3.8 3.8 18.8 5.2 20.2 20.2 5.2z"/>' +
    '</g></svg>'
});

/**
 * Return the address of the icon as a picture: a card of a notebook shows no other icon. Its colour
 * does not follow the theme, so it is one for light and dark themes.
 */
export function cardPicture(): string {
  const svg = nbdistIcon.svgstr.replace('#616161', '#2b87e3');
  return `data:image/svg+xml,${encodeURIComponent(svg)}`;
}
